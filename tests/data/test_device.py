"""Normalised batches on the device, and the synthetic batch."""

from collections import namedtuple

import pytest
import torch
from torchvision.transforms import v2

from cl_train.data.device import DeviceFormat, DevicePrefetcher, Normalise
from tests.data.image_folders import CPU, data_of, val_count

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FORMATS = [torch.channels_last, torch.contiguous_format]
Sample = namedtuple("Sample", "image label")


def images(layout, count=19, height=13, width=17):
    generator = torch.Generator().manual_seed(0)
    plain = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)
    return plain.to(memory_format=layout)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_normalise_is_torchvisions_in_float32(source, target):
    raw = images(source)
    ours = Normalise(MEAN, STD, DeviceFormat(CPU, torch.float32, target))(raw)
    expected = v2.functional.normalize(raw / 255, MEAN, STD)
    assert ours.is_contiguous(memory_format=target)
    assert (ours - expected).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.016), (torch.float16, 2e-3)]
)
def test_other_types_are_rounded_once_from_float32_and_the_kernel_for_gpus_computes_the_same(
    dtype, tolerance
):
    raw = images(torch.channels_last)
    full = Normalise(MEAN, STD, DeviceFormat(CPU, torch.float32, torch.channels_last))(raw)
    normalise = Normalise(MEAN, STD, DeviceFormat(CPU, dtype, torch.channels_last))
    half = normalise(raw)
    assert (
        half.dtype == dtype and half.stride() == full.stride() and torch.equal(half, full.to(dtype))
    )
    out = torch.empty_like(raw, dtype=dtype, memory_format=torch.channels_last)
    normalise.in_one_kernel(raw, out)
    assert (out.float() - half.float()).abs().max() < tolerance


def test_wrong_arguments_are_refused():
    for mean, std in (([0.5], [0.5, 0.5]), ([0.5], [0.0])):
        with pytest.raises(ValueError, match="std"):
            DevicePrefetcher([], "cpu", mean, std)
    for settings in ({"dtype": torch.int32}, {"memory_format": torch.preserve_format}):
        with pytest.raises(ValueError, match=r"int32|preserve_format"):
            DevicePrefetcher([], "cpu", **settings)


def test_the_prefetcher_keeps_structures_and_casts_what_is_normalised_already():
    batch = Sample(torch.rand(2, 3, 8, 8), torch.tensor([1, 2]))
    (found,) = DevicePrefetcher([batch], "cpu", dtype=torch.float16)
    assert isinstance(found, Sample) and found.label is batch.label
    assert torch.equal(found.image, batch.image.half())
    assert found.image.is_contiguous(memory_format=torch.channels_last)
    raw = images(torch.channels_last, count=2)
    (found,) = DevicePrefetcher([{"views": [raw, raw], "flow": torch.rand(2, 2, 8, 8)}], "cpu")
    assert found["views"][1].dtype == torch.float32 and torch.equal(*found["views"])
    assert found["flow"].is_contiguous(), "not an image: there are uint8 images in the batch"


def test_synthetic_yields_one_batch_again_and_again_the_same_in_both_layouts():
    options = {"name": "synthetic", "image_size": 16, "batch_size": 8}
    options |= {"synthetic_images": 100, "synthetic_classes": 7}
    data, pixels = data_of(**options), []
    for target in FORMATS:
        form = DeviceFormat(CPU, torch.bfloat16, target)
        batches = list(data.train(0, form))
        assert len(batches) == data.batch_count() == 12
        assert all(batch is batches[0] for batch in batches)
        images, targets = batches[0].images, batches[0].targets
        assert images.dtype == torch.bfloat16 and images.is_contiguous(memory_format=target)
        assert images.shape == (8, 3, 16, 16) and 0 <= targets.min() <= targets.max() < 7
        assert len(list(data.train(0, form, first_batch=10))) == 2
        pixels.append(images)
    assert torch.equal(*pixels)
    data = data_of(**options, world_size=3, size_schedule=[[0, 16], [2, 32]], val_size=24)
    assert data.batch_count() == 100 // 24 and 3 * val_count(data) == data.val_images
    batches = [*data.train(0, form), *data.train(2, form), *data.validation(form)]
    assert [batch.images.shape[2] for batch in batches] == [16] * 4 + [32] * 4 + [24]
