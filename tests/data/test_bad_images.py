"""Bad images in the loader: named, counted, replaced or left out."""

import contextlib
import os

import pytest
import torch

from cl_train.data.loader import BadImageError
from tests.data.image_folders import (
    FLOAT_CHANNELS_LAST,
    encoded,
    folder_data,
    jpeg,
    noise,
    train_batches,
    write_folder,
)

ODD_SIZES = [(1, 1), (1, 500), (500, 1), (33, 500), (2, 3), (1100, 1000)]


@pytest.mark.parametrize(("height", "width"), ODD_SIZES)
def test_odd_sizes_decode_and_load(tmp_path, height, width):
    root = write_folder(tmp_path, train=2, val=2)
    for split in ("train", "val"):
        (root / split / "class_0" / "odd.jpg").write_bytes(encoded(noise(height, width)))
    data = folder_data(root, batch_size=3)
    batches = train_batches(data)
    assert batches[0][0].shape == (3, 3, 32, 32)
    assert sum(len(batch.targets) for batch in data.validation(FLOAT_CHANNELS_LAST)) == 3


def make_fifo(path):
    os.mkfifo(path)


def make_dangling_link(path):
    path.symlink_to(path.parent / "nothing")


def make_unreadable_device(path):
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(make_fifo, "FIFO"), (make_dangling_link, "No such file"), (make_unreadable_device, "device")],
)
def test_what_is_no_file_is_refused_at_once(tmp_path, make, reason):
    root = write_folder(tmp_path, train=4, val=2)
    make(root / "train" / "class_0" / "odd.jpg")
    data = folder_data(root, batch_size=5)
    with pytest.raises(BadImageError, match=f"odd.jpg' cannot be decoded: .*{reason}"):
        train_batches(data)


def test_a_folder_with_an_images_name_is_a_folder(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    (root / "train" / "class_0" / "folder.jpg").mkdir()
    (root / "train" / "class_0" / "folder.jpg" / "inner.jpg").write_bytes(jpeg())
    assert folder_data(root).train_images == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_file_and_what_to_do(tmp_path, workers):
    root = write_folder(tmp_path, train=8, val=2)
    broken = root / "train" / "class_1" / "broken.jpg"
    broken.write_bytes(jpeg()[:300])
    data = folder_data(root, batch_size=9, workers=workers)
    with pytest.raises(BadImageError, match=r"broken\.jpg' cannot be decoded: .*on_bad_image=skip"):
        train_batches(data)
    data.close()


def test_skip_counts_and_substitutes_the_same_image_for_any_workers(tmp_path):
    root = write_folder(tmp_path, train=12, val=2)
    (root / "train" / "class_0" / "0006.jpg").write_bytes(b"broken")
    results = []
    for workers in (0, 1, 3):
        data = folder_data(root, workers=workers, on_bad_image="skip")
        results.append(train_batches(data))
        assert data.bad_images.skipped == 1
        data.close()
    for other in results[1:]:
        for (images, targets), (other_images, other_targets) in zip(results[0], other, strict=True):
            assert torch.equal(images, other_images) and torch.equal(targets, other_targets)
    assert sorted(torch.cat([targets for _, targets in results[0]]).tolist()) == [0] * 6 + [1] * 6


def test_the_substitute_brings_its_own_label(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    for name in ("0000.jpg", "0002.jpg"):
        (root / "train" / "class_0" / name).write_bytes(jpeg()[:300])
    data = folder_data(root, on_bad_image="skip")
    ((_, targets),) = train_batches(data)
    assert targets.tolist() == [1, 1, 1, 1]


def test_skip_stops_at_the_limit(tmp_path):
    root = write_folder(tmp_path, train=8, val=2)
    for name in ("0000.jpg", "0002.jpg", "0004.jpg"):
        (root / "train" / "class_0" / name).write_bytes(jpeg()[:300])
    data = folder_data(root, batch_size=8, on_bad_image="skip", max_bad_images=2)
    with pytest.raises(BadImageError, match=r"more than data\.max_bad_images=2"):
        train_batches(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_leaves_bad_images_out(tmp_path, workers):
    """A substitute would count another image twice."""
    root = write_folder(tmp_path, train=4, val=11)
    (root / "val" / "class_0" / "0004.jpg").write_bytes(jpeg()[:300])
    data = folder_data(root, workers=workers, on_bad_image="skip")
    batches = list(data.validation(FLOAT_CHANNELS_LAST))
    assert sum(len(batch.targets) for batch in batches) == 10 and data.bad_images.skipped == 1
    assert all(len(batch.images) == len(batch.targets) for batch in batches)
    data.close()


def test_a_bad_image_counts_once_however_many_epochs(tmp_path):
    root = write_folder(tmp_path, train=12, val=4)
    (root / "train" / "class_0" / "0000.jpg").write_bytes(b"")
    with contextlib.closing(folder_data(root, on_bad_image="skip", max_bad_images=1)) as data:
        for epoch in range(5):
            train_batches(data, epoch)
        assert data.bad_images.skipped >= 4
    (root / "train" / "class_0" / "0002.jpg").write_bytes(jpeg()[:300])
    said = r"2 images cannot be decoded, more than data\.max_bad_images=1"
    data = folder_data(root, on_bad_image="skip", max_bad_images=1)
    with contextlib.closing(data), pytest.raises(BadImageError, match=said):
        for epoch in range(3):
            train_batches(data, epoch)
