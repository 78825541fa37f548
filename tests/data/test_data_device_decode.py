"""Decoding on the device, with a stand-in for torchcodec: the same crops and pixels as the CPU path."""

import sys

import pytest
import torch

from cl_train.config.schema import AugmentConfig, ConfigError
from cl_train.data import device_decode
from cl_train.data.decode import Encoded
from cl_train.data.loader import BadImageError
from tests.data.image_folders import FLOAT_CHANNELS_LAST, encoded, folder_data, jpeg, noise, write_folder


@pytest.fixture
def stand_in(monkeypatch):
    """As torchcodec's: whole batches of ordinary JPEGs, a RuntimeError for the batch if one is broken."""

    def decode(files, device):
        try:
            return [torch.from_numpy(Encoded(data).decode()).permute(2, 0, 1).to(device) for data in files]
        except Exception as error:
            raise RuntimeError(str(error)) from None

    monkeypatch.setattr("cl_train.data.build.torchcodec_decoder", lambda: decode)


def test_pixels_and_order_are_the_cpu_paths_within_one_level(tmp_path, stand_in):
    root = write_folder(tmp_path, train=22, val=3)
    (root / "train" / "class_0" / "png.jpg").write_bytes(encoded(noise(50, 70), "PNG"))
    (root / "train" / "class_0" / "cmyk.jpg").write_bytes(encoded(noise(50, 70).convert("CMYK")))
    ours = list(folder_data(root, decode="gpu", workers=2).train(1, FLOAT_CHANNELS_LAST, first_batch=1))
    expected = list(folder_data(root).train(1, FLOAT_CHANNELS_LAST, first_batch=1))
    level = 1 / 255 / 0.224
    for batch, other in zip(ours, expected, strict=True):
        assert torch.equal(batch.targets, other.targets)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert (batch.images - other.images).abs().max() < 1.1 * level
        assert (batch.images - other.images).abs().mean() < 0.3 * level


def test_a_bad_image_is_named(tmp_path, stand_in):
    root = write_folder(tmp_path, train=4, val=2)
    (root / "train" / "class_0" / "broken.jpg").write_bytes(jpeg()[:300])
    with pytest.raises(BadImageError, match=r"broken\.jpg' cannot be decoded"):
        list(folder_data(root, decode="gpu", batch_size=5).train(0, FLOAT_CHANNELS_LAST))


def test_what_does_not_go_together_is_refused(tmp_path, stand_in):
    root = write_folder(tmp_path, train=4, val=2)
    with pytest.raises(ConfigError, match="does not go with"):
        folder_data(root, decode="gpu", augment=AugmentConfig(policy="randaugment"))
    with pytest.raises(ConfigError, match="does not go with"):
        folder_data(root, decode="gpu", on_bad_image="skip")


def test_without_torchcodec_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ConfigError, match="pip install torchcodec"):
        device_decode.torchcodec_decoder()
