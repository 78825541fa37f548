"""From the official archives to a folder, hostile archives, and the check of a folder."""

import errno
import gzip
import shutil
from unittest.mock import Mock

import pytest
from PIL import Image

from cl_train.commands.prepare_imagenet import main
from cl_train.data.images import list_folder
from cl_train.data.prepare import archives as imagenet
from cl_train.data.prepare.archives import unpack, validation_labels
from cl_train.data.prepare.folders import verify
from cl_train.errors import ConfigError
from tests.conftest import contents
from tests.imagenet_archives import (
    SYNSETS,
    WNIDS,
    devkit,
    jpeg,
    make_archives,
    tar_of,
    train_tar,
    val_wnid,
)


def test_synsets_are_in_the_order_of_ilsvrc_ids():
    """Checked against the first images of the official ground truth, and their class folders."""
    assert len(SYNSETS) == len(set(SYNSETS)) == 1000
    official = {1: "n02119789", 490: "n01751748", 361: "n09193705", 171: "n02105855"}
    official |= {822: "n04263257", 1000: "n03255030", 13: "n02346627", 599: "n03794056"}
    assert {number: SYNSETS[number - 1] for number in official} == official


def test_labels_follow_the_ids_not_the_order_of_the_names(tmp_path):
    kit = tmp_path / "kit.tar.gz"
    kit.write_bytes(devkit(9))
    labels = validation_labels(kit)
    assert labels == [val_wnid(number) for number in range(1, 10)]
    assert labels[:3] == ["n01443537", "n02102040", "n01440764"]
    without = gzip.compress(tar_of([("ILSVRC2012_devkit_t12/readme.txt", b"hello")]))
    truth = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
    wrong = gzip.compress(tar_of([(truth, b"1001\n")]))
    for content in (b"junk", devkit(9)[:-30], without, wrong):
        kit.write_bytes(content)
        with pytest.raises(ConfigError, match=r"devkit=.*kit\.tar\.gz.*validation_ground_truth"):
            validation_labels(kit)


def test_the_official_archives_become_a_folder_that_trains(tmp_path, capsys):
    """Names may begin with "./"."""
    archives, out = make_archives(tmp_path), tmp_path / "out"
    archives["train"].write_bytes(train_tar(prefix="./"))
    assert main(["tars", f"out={out}", *(f"{key}={value}" for key, value in archives.items())]) == 0
    assert main(["verify", f"data.root={out}", "expect=any", "deep=true"]) == 0
    printed = capsys.readouterr().out
    assert "train: 12 images" in printed and "9 val images" in printed and "0 problems" in printed
    assert (out / "train/n01443537/n01443537_2.JPEG").read_bytes() == jpeg(1002)
    assert (out / "val/n01443537/ILSVRC2012_val_00000001.JPEG").read_bytes() == jpeg(-1 % 9999)
    assert not list(out.rglob(".partial"))
    folder = list_folder(out)
    assert folder.classes == WNIDS and len(folder.train) == 12 and len(folder.val) == 9
    before = contents(out)
    assert unpack(out, **archives) == {"train": 12, "val": 9}  # again: nothing to do
    assert contents(out) == before


def test_archives_that_do_not_fit_are_named(tmp_path):
    archives = make_archives(tmp_path)
    kits = {count: tmp_path / f"kit{count}.tar.gz" for count in (8, 11)}
    for count, kit in kits.items():
        kit.write_bytes(devkit(count))
    val = archives["val"]
    for given, message in (
        ({"val": val, "devkit": kits[11]}, r"2 of 11 .*val_00000010"),
        ({"val": val, "devkit": kits[8]}, r"number 9.* 8 labels"),
        ({"train": val}, r"ILSVRC2012_val_00000001\.JPEG"),  # swapped
        ({"val": tmp_path / "no.tar"}, "no such file\n.*needs devkit"),
        ({}, "nothing to do"),
    ):
        with pytest.raises(ConfigError, match=message):
            unpack(tmp_path / "out", **given)


def test_after_a_full_disk_or_a_damaged_archive_a_good_one_continues(tmp_path, monkeypatch):
    good, out = make_archives(tmp_path)["train"], tmp_path / "out"
    whole = good.read_bytes()
    good.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ConfigError, match="truncated"):
        unpack(out, train=good)
    good.write_bytes(whole)
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr(imagenet, "read_member", full)
        assert main(["tars", f"out={out}", f"train={good}"]) == 1
    assert unpack(out, train=good) == {"train": 12}


@pytest.fixture
def prepared(tmp_path):
    unpack(tmp_path / "out", **make_archives(tmp_path))
    return tmp_path / "out"


def check(root, deep=False, expect="any"):
    lines, problems = verify(root, deep=deep, expect=expect, workers=1)
    return lines, "\n".join(problems)


def test_a_good_folder_has_no_problems(prepared):
    png = prepared / "train/n01440764/n01440764_9.JPEG"  # as a few of ImageNet are
    Image.new("RGB", (8, 8)).save(png, "PNG")
    lines = ["train: 13 images in 3 classes", "val: 9 images in 3 classes"]
    assert check(prepared) == check(prepared, deep=True) == (lines, "")
    problems = check(prepared, expect="imagenet")[1]
    assert "train: 13 images in 3 classes; ILSVRC2012 has 1,281,167" in problems


def test_problems_are_named(prepared):
    folder = prepared / "train/n01440764"
    (folder / "n01440764_0.JPEG").write_bytes(b"")
    (folder / "n01440764_1.JPEG").write_bytes(b"<html>not found</html>")
    (folder / "notes.txt").write_text("x")
    (folder / "link.JPEG").symlink_to("nowhere")
    cut = prepared / "train/n01443537/n01443537_0.JPEG"
    cut.write_bytes(cut.read_bytes()[:-300])
    (prepared / "train/n09999999").mkdir()
    shutil.rmtree(prepared / "val/n01440764")
    lines, problems = check(prepared)
    assert lines == ["train: 10 images in 4 classes", "val: 6 images in 2 classes"]
    for text in (
        "4 files",
        "train with data.on_bad_image=skip",
        "n01440764_0.JPEG: the file is empty",
        "n01440764_1.JPEG: not an image",
        "notes.txt: ",
        "link.JPEG: No such file",
        "train: 1 class without an image: n09999999",
        "2 classes in train only: n01440764, n09999999",
    ):
        assert text in problems
    assert "n01443537_0.JPEG" not in problems, "only decoding finds it"
    lines, problems = check(prepared, deep=True)
    assert lines[0] == "train: 9 images in 4 classes"
    assert "n01443537_0.JPEG: " in problems and "truncated" in problems


def test_folders_that_train_are_verified(prepared, capsys):
    flat = prepared / "train"
    Image.new("RGB", (8, 8)).save(flat / "n01440764/a.webp")
    shutil.rmtree(prepared / "val")
    for root in (flat, prepared):
        words = ["verify", f"data.root={root}", "expect=any", "deep=true"]
        assert main([*words, "data.extensions=[.jpeg,.webp]"]) == 0
        assert "train: 13 images in 3 classes" in capsys.readouterr().out
        assert main(words) == 1 and "a.webp: its name does not end" in capsys.readouterr().out


def test_wrong_usage_is_named():
    for words, message in (
        ("verfy", r"did you mean verify\?"),
        ("tars", r"out=\.\.\. is missing"),
        ("verify data.root=/nowhere", "is not a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(words.split())
