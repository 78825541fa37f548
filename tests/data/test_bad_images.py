"""Bad images in the loader: named, counted, replaced or left out."""

import os
from contextlib import closing

import pytest
import torch

from cl_train.data.loader import BadImageError
from tests.data.image_folders import encoded, folder_data, jpeg, noise, same, train_batches, val_count, write_folder

ODD_SIZES = [(1, 1), (1, 500), (500, 1), (33, 500), (2, 3), (1100, 1000)]
TRUNCATED = jpeg()[:300]


def test_odd_sizes_decode_and_load(tmp_path):
    root = write_folder(tmp_path, train=2, val=2)
    for split in ("train", "val"):
        for height, width in ODD_SIZES:
            (root / split / "class_0" / f"{height}x{width}.jpg").write_bytes(encoded(noise(height, width)))
    data = folder_data(root, batch_size=8)
    assert train_batches(data)[0][0].shape == (8, 3, 32, 32) and val_count(data) == 8


@pytest.mark.parametrize(
    ("make", "reason", "workers"),
    [
        (os.mkfifo, "FIFO", 0),
        (lambda path: path.symlink_to(path.parent / "nothing"), "No such file", 0),
        (lambda path: path.symlink_to("/dev/null"), "device", 0),
        (lambda path: path.write_bytes(TRUNCATED), ".*on_bad_image=skip", 2),
    ],
)
def test_an_error_names_the_file_and_what_to_do(tmp_path, make, reason, workers):
    root = write_folder(tmp_path, train=8, val=2)
    make(root / "train" / "class_1" / "odd.jpg")
    data = folder_data(root, batch_size=9, workers=workers)
    with closing(data), pytest.raises(BadImageError, match=f"odd.jpg' cannot be decoded: .*{reason}"):
        train_batches(data)


def test_a_folder_with_an_images_name_is_a_folder(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    (root / "train" / "class_0" / "folder.jpg").mkdir()
    (root / "train" / "class_0" / "folder.jpg" / "inner.jpg").write_bytes(jpeg())
    assert folder_data(root).train_images == 5


def test_skip_counts_and_substitutes_the_same_image_with_its_label_for_any_workers(tmp_path):
    root = write_folder(tmp_path / "one", train=12, val=11)
    (root / "train" / "class_0" / "0006.jpg").write_bytes(b"broken")
    (root / "val" / "class_0" / "0004.jpg").write_bytes(TRUNCATED)
    reference = train_batches(folder_data(root, on_bad_image="skip"))
    assert sorted(torch.cat([targets for _, targets in reference]).tolist()) == [0] * 6 + [1] * 6
    for workers in (0, 3):
        with closing(folder_data(root, workers=workers, on_bad_image="skip")) as data:
            same(train_batches(data), reference)
            assert data.bad_images.skipped == 1
            assert val_count(data) == 10, "a substitute would count another image twice"
            assert data.bad_images.skipped == 2
    root = write_folder(tmp_path / "class", train=4, val=2)
    for name in ("0000.jpg", "0002.jpg"):
        (root / "train" / "class_0" / name).write_bytes(TRUNCATED)
    ((_, targets),) = train_batches(folder_data(root, on_bad_image="skip"))
    assert targets.tolist() == [1, 1, 1, 1]


def test_the_limit_counts_each_bad_image_once_however_many_epochs(tmp_path):
    root = write_folder(tmp_path, train=12, val=4)
    (root / "train" / "class_0" / "0000.jpg").write_bytes(b"")
    data = folder_data(root, on_bad_image="skip", max_bad_images=1)
    for epoch in range(5):
        train_batches(data, epoch)
    assert data.bad_images.skipped >= 4
    (root / "train" / "class_0" / "0002.jpg").write_bytes(TRUNCATED)
    data = folder_data(root, on_bad_image="skip", max_bad_images=1)
    with pytest.raises(BadImageError, match=r"2 images cannot be decoded, more than data\.max_bad_images=1"):
        for epoch in range(3):
            train_batches(data, epoch)
