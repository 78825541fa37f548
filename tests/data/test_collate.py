"""channels_last_collate: layout, values, structure, shared memory, pinning, refusals."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from cl_train.data.image_loader import channels_last_collate

Pair = namedtuple("Pair", "image label")


def arrays(count=5, shape=(3, 8, 12), dtype=np.uint8):
    channels, height, width = shape
    generator = np.random.default_rng(0)
    return [generator.integers(0, 255, (height, width, channels)).astype(dtype) for _ in range(count)]


def is_nhwc(batch):
    _, channels, height, width = batch.shape
    return batch.stride() == (height * width * channels, 1, width * channels, channels)


@pytest.mark.parametrize("shape", [(3, 8, 12), (1, 8, 12), (4, 5, 1), (3, 1, 1), (16, 6, 6)])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_every_kind_of_image_becomes_the_same_channels_last_batch(shape, count, dtype):
    hwc = arrays(count, shape, dtype)
    expected = torch.stack([torch.from_numpy(image) for image in hwc]).permute(0, 3, 1, 2)
    planar = [torch.from_numpy(image.transpose(2, 0, 1).copy()) for image in hwc]
    interleaved = [torch.from_numpy(image).permute(2, 0, 1) for image in hwc]
    kinds = {
        "array": hwc,
        "interleaved": interleaved,
        "planar": planar,
        "mixed strides": [planar[place] if place % 2 else interleaved[place] for place in range(count)],
        "flipped": [image[:, ::-1].copy()[:, ::-1] for image in hwc],
    }
    for kind, images in kinds.items():
        batch = channels_last_collate(images)
        assert torch.equal(batch, expected) and batch.dtype == expected.dtype and is_nhwc(batch), kind
    half = channels_last_collate([image.bfloat16() for image in planar])
    assert torch.equal(half, expected.bfloat16()) and half.dtype == torch.bfloat16


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 4)])
def test_pil_images(mode, channels):
    images = [Image.fromarray(array).convert(mode) for array in arrays()]
    batch = channels_last_collate(images)
    assert batch.shape == (5, channels, 8, 12) and is_nhwc(batch)
    expected = np.stack([np.asarray(image).reshape(8, 12, channels) for image in images])
    assert np.array_equal(batch.permute(0, 2, 3, 1).numpy(), expected)


def test_structure_is_kept_and_the_rest_is_default_collates():
    named = channels_last_collate([Pair(image, 0.5) for image in arrays(3)])
    assert isinstance(named, Pair) and named.label.dtype == torch.float64 and is_nhwc(named.image)
    batch = channels_last_collate(
        [{"views": [image, image], "box": torch.ones(4), "name": "a", "tags": (1, 2)} for image in arrays(3)]
    )
    assert [is_nhwc(view) for view in batch["views"]] == [True, True]
    assert batch["box"].shape == (3, 4) and batch["name"] == ["a"] * 3
    assert torch.equal(batch["tags"][1], torch.tensor([2, 2, 2]))


TARGETS = [7, (1, 2.5), [1, (2, "a")], Pair(1, "a"), ((1, 2), [Pair(3, (4,))])]


@pytest.mark.parametrize("target", [*TARGETS, {"box": (1, 2), "ids": [3, 4], "size": torch.ones(2)}])
def test_targets_without_images_are_exactly_default_collates(target):
    (_, ours), expected = channels_last_collate([(arrays(1)[0], target)] * 2), default_collate([target] * 2)
    assert repr(ours) == repr(expected) and type(ours) is type(expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_hands_over_a_batch_in_shared_memory(workers):
    samples = [(torch.from_numpy(image).permute(2, 0, 1), label) for label, image in enumerate(arrays(6))]
    batches = list(DataLoader(samples, 3, collate_fn=channels_last_collate, num_workers=workers))
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2], [3, 4, 5]]
    assert all(is_nhwc(images) and images.is_shared() == (workers == 1) for images, _ in batches)
    assert torch.equal(batches[1][0], torch.stack([image for image, _ in samples[3:]]))


GOOD = arrays(1)[0]
PIL = Image.fromarray(GOOD)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([GOOD, np.zeros((8, 13, 3), np.uint8)], ["sample 1", "(8, 13, 3)", "(8, 12, 3)"]),
        ([GOOD, np.zeros((8, 12, 3), np.float32)], ["sample 1", "float32", "uint8"]),
        ([GOOD, np.zeros((8, 12), np.uint8)], ["sample 1", "(8, 12)", "(8, 12, 3)"]),
        ([GOOD, torch.zeros(3, 8, 12, dtype=torch.uint8)], ["sample 1", "(3, 8, 12)", "(8, 12, 3)"]),
        ([GOOD, None], ["sample 1", "NoneType", "(8, 12, 3)"]),
        ([(GOOD, 0), (GOOD,)], ["sample 1"]),
        ([{"x": GOOD}, {"y": GOOD}], ["sample 1"]),
        ([(GOOD, torch.ones(2)), (GOOD, torch.ones(3))], ["sample 1"]),
        ([PIL, PIL.convert("L")], ["sample 1", "mode L"]),
        ([PIL.convert("P")], ["convert"]),
        ([], ["empty"]),
        ([torch.zeros(0, 8, 8)] * 2, ["without pixels"]),
        ([torch.zeros(3, 0, 8)] * 2, ["without pixels"]),
        ([np.zeros((8, 0, 3), np.uint8)] * 2, ["without pixels"]),
        ([Image.new("RGB", (0, 0))] * 2, ["without pixels"]),
        ([torch.zeros(3, 8, 8).to_sparse()] * 2, ["sparse"]),
        ([torch.zeros(3, 8, 8, device="meta")] * 2, ["meta"]),
    ],
)
def test_what_cannot_be_collated_is_refused_with_its_index_and_both_forms(samples, words):
    with pytest.raises(ValueError, match="cannot collate") as caught:
        channels_last_collate(samples)
    assert all(word in str(caught.value) for word in words)
