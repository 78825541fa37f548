"""From the official archives to a folder, hostile archives, and the check of a folder."""

import errno
import hashlib
import os
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from cl_train.commands.prepare_imagenet import main
from cl_train.config.schema import ConfigError
from cl_train.data.folder import read_folder
from cl_train.imagenet import archives as imagenet
from cl_train.imagenet.archives import synsets, unpack, validation_labels
from cl_train.imagenet.verify import verify
from tests.imagenet_archives import HOSTILE, WNIDS, devkit, jpeg, make_archives, tar_of, val_wnid


def prepare(out: Path, **archives: Path | None) -> dict[str, int]:
    return unpack(out, archives.get("train"), archives.get("val"), archives.get("devkit"))


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below `folder`, with the digest of files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


# --- the development kit ----------------------------------------------------------------------------------------------


def test_synsets_are_in_the_order_of_ilsvrc_ids() -> None:
    """Checked against the first images of the official ground truth, and the class folders they belong to."""
    known = synsets()
    assert len(known) == len(set(known)) == 1000
    assert known[0] == "n02119789" and known[-1] == "n03255030", "kit fox, dumbbell"
    official = [490, 361, 171, 822, 297, 482, 13, 704, 599, 164]
    assert [known[number - 1] for number in official] == [
        *("n01751748", "n09193705", "n02105855", "n04263257", "n03125729"),
        *("n01735189", "n02346627", "n02776631", "n03794056", "n02328150"),
    ]


def test_labels_follow_the_ids_not_the_order_of_the_names(tmp_path: Path) -> None:
    (tmp_path / "kit.tar.gz").write_bytes(devkit(9))
    labels = validation_labels(tmp_path / "kit.tar.gz")
    assert labels == [val_wnid(number) for number in range(1, 10)]
    assert labels[:3] == ["n01443537", "n02102040", "n01440764"]


def test_labels_from_an_unpacked_kit_and_from_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "kit.tar.gz").write_bytes(devkit(9))
    with tarfile.open(tmp_path / "kit.tar.gz") as archive:
        archive.extractall(tmp_path / "kit", filter="data")
    labels = validation_labels(tmp_path / "kit.tar.gz")
    assert validation_labels(tmp_path / "kit") == validation_labels(tmp_path / "kit/ILSVRC2012_devkit_t12") == labels
    (tmp_path / "labels.txt").write_text("\n".join(labels) + "\n")
    assert validation_labels(tmp_path / "labels.txt") == labels


def test_damaged_kits_are_named(tmp_path: Path) -> None:
    kit = tmp_path / "kit.tar.gz"
    for content in (b"", b"junk", devkit(9)[:-30], devkit(9)[:60]):
        kit.write_bytes(content)
        with pytest.raises(ConfigError, match=r"devkit=.*kit\.tar\.gz"):
            validation_labels(kit)
    (tmp_path / "labels.txt").write_text("n01440764\n../../etc\n")
    with pytest.raises(ConfigError, match="WordNet id"):
        validation_labels(tmp_path / "labels.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="validation_ground_truth"):
        validation_labels(tmp_path / "empty")


def test_a_kit_that_unpacks_to_gigabytes_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cl_train.imagenet.archives._MAX_KIT_BYTES", 1000)
    (tmp_path / "kit.tar.gz").write_bytes(devkit(9))
    with pytest.raises(ConfigError, match="not the official kit"):
        validation_labels(tmp_path / "kit.tar.gz")


# --- prepare ----------------------------------------------------------------------------------------------------------


def test_the_official_archives_become_a_folder_that_trains(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    assert prepare(tmp_path / "out", **archives) == {"train": 12, "val": 9}
    out = tmp_path / "out"
    assert (out / "train/n01443537/n01443537_2.JPEG").read_bytes() == jpeg(1002)
    assert (out / "val/n01443537/ILSVRC2012_val_00000001.JPEG").read_bytes() == jpeg(-1 % 9999)
    assert not list(out.rglob(".partial"))
    folder = read_folder(out)
    assert folder.classes == WNIDS and len(folder.train) == 12 and len(folder.val) == 9
    before = snapshot(out)
    assert prepare(out, **archives) == {"train": 12, "val": 9}  # again: nothing to do
    assert snapshot(out) == before


def test_interrupted_between_any_two_files_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = make_archives(tmp_path)
    prepare(tmp_path / "reference", **archives)
    read = imagenet.read_member
    for budget in range(1, 9):
        left = budget

        def read_some(*arguments: object) -> bytes:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(imagenet, "read_member", read_some)
        with suppress(KeyboardInterrupt):
            prepare(tmp_path / "out", **archives)
    monkeypatch.undo()
    prepare(tmp_path / "out", **archives)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "reference")


def test_flat_validation_files_are_moved(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    flat = tmp_path / "out/val"
    flat.mkdir(parents=True)
    with tarfile.open(archives["val"]) as archive:
        archive.extractall(flat, filter="data")
    assert prepare(tmp_path / "out", val=flat, devkit=archives["devkit"]) == {"val": 9}
    prepare(tmp_path / "reference", val=archives["val"], devkit=archives["devkit"])
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "reference")


def test_half_full_class_folders_of_another_program_are_refused(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    (tmp_path / "out/train/n01440764").mkdir(parents=True)
    with pytest.raises(ConfigError, match="n01440764"):
        prepare(tmp_path / "out", train=archives["train"])


def test_missing_validation_images_are_named(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    (tmp_path / "kit.tar.gz").write_bytes(devkit(11))
    with pytest.raises(ConfigError, match=r"2 of 11 .*val_00000010"):
        prepare(tmp_path / "a", val=archives["val"], devkit=tmp_path / "kit.tar.gz")
    (tmp_path / "kit.tar.gz").write_bytes(devkit(8))
    with pytest.raises(ConfigError, match=r"number 9.* 8 labels"):
        prepare(tmp_path / "b", val=archives["val"], devkit=tmp_path / "kit.tar.gz")


def test_swapped_archives_are_named(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    with pytest.raises(ConfigError, match=r"ILSVRC2012_val_00000001\.JPEG"):
        prepare(tmp_path / "out", train=archives["val"])


def test_every_wrong_argument_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, val=tmp_path / "no.tar")
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="nothing to do"):
        prepare(tmp_path)


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = make_archives(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(ConfigError, match="GB needed"):
        prepare(tmp_path / "out", train=archives["train"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_archives_write_nothing_outside(tmp_path: Path, kind: str) -> None:
    sandbox = tmp_path / "a/b/c"
    sandbox.mkdir(parents=True)
    (tmp_path / "a/secret").write_text("secret")
    (sandbox / "train.tar").write_bytes(HOSTILE[kind]())
    before = snapshot(tmp_path)
    outside_before = set(os.listdir("/tmp"))
    with pytest.raises(ConfigError, match=r"train\.tar"):
        prepare(sandbox / "out", train=sandbox / "train.tar")
    after = snapshot(tmp_path)
    created = set(after) - set(before)
    assert not created
    assert {path: after[path] for path in before} == before
    assert "n01440764_2.JPEG" not in set(os.listdir("/tmp")) - outside_before
    assert not (sandbox / "out").exists(), "what was begun is removed"


def test_after_a_damaged_archive_a_good_one_continues(tmp_path: Path) -> None:
    good = Path(make_archives(tmp_path)["train"])
    whole = good.read_bytes()
    good.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ConfigError, match="truncated"):
        prepare(tmp_path / "out", train=good)
    good.write_bytes(whole)
    assert prepare(tmp_path / "out", train=good) == {"train": 12}


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare(tmp_path / "out", **make_archives(tmp_path))
    return tmp_path / "out"


def check(root: Path, deep: bool = False, expect: str = "any") -> tuple[dict[str, int], str]:
    report = verify(root, deep=deep, official_counts=expect == "imagenet", workers=1)
    return report.images, "\n".join(report.problems)


@pytest.mark.parametrize("deep", [False, True])
def test_a_good_folder_has_no_problems(prepared: Path, deep: bool) -> None:
    assert check(prepared, deep) == ({"train": 12, "val": 9}, "")


def test_counts_are_those_of_imagenet_unless_told_otherwise(prepared: Path) -> None:
    _, problems = check(prepared, expect="imagenet")
    for text in ("train: 12 images in 3 classes; ILSVRC2012 has 1,281,167", "val: 9 images"):
        assert text in problems


def test_bad_files_are_named(prepared: Path) -> None:
    folder = prepared / "train/n01440764"
    (folder / "n01440764_0.JPEG").write_bytes(b"")
    (folder / "n01440764_1.JPEG").write_bytes(b"<html>not found</html>")
    (folder / "notes.txt").write_text("x")
    (folder / "link.JPEG").symlink_to("nowhere")
    os.mkfifo(folder / "fifo.JPEG")
    (folder / "n01440764_3.JPEG").unlink()
    images, problems = check(prepared)
    assert images == {"train": 9, "val": 9}
    for text in (
        "5 files",
        "n01440764_0.JPEG: the file is empty",
        "n01440764_1.JPEG: not an image",
        "notes.txt: ",
        "link.JPEG: No such file",
        "fifo.JPEG: not a regular file",
    ):
        assert text in problems


def test_deep_finds_what_only_decoding_finds(prepared: Path) -> None:
    path = prepared / "train/n01440764/n01440764_0.JPEG"
    path.write_bytes(path.read_bytes()[:-300])
    assert check(prepared)[1] == ""
    images, problems = check(prepared, deep=True)
    assert images["train"] == 11 and "n01440764_0.JPEG: " in problems and "truncated" in problems


def test_classes_of_train_and_val_must_match(prepared: Path) -> None:
    (prepared / "train/n09999999").mkdir()
    shutil.rmtree(prepared / "val/n01440764")
    problems = check(prepared)[1]
    assert "2 classes are in train only: n01440764, n09999999" in problems
    assert "train: 1 classes have no image: n09999999" in problems


def test_a_png_named_jpeg_is_an_image(prepared: Path) -> None:
    Image.new("RGB", (8, 8)).save(prepared / "train/n01440764/n01440764_9.JPEG", "PNG")
    assert check(prepared) == check(prepared, deep=True) == ({"train": 13, "val": 9}, "")


# --- the program ------------------------------------------------------------------------------------------------------


def test_the_command_unpacks_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives = make_archives(tmp_path)
    out = tmp_path / "out"
    assert main(["tars", f"out={out}", *(f"{key}={value}" for key, value in archives.items())]) == 0
    assert "train: 12 images" in capsys.readouterr().out
    assert main(["verify", f"data.root={out}", "expect=any", "deep=true"]) == 0
    (out / "train/n01440764/n01440764_0.JPEG").write_bytes(b"")
    assert main(["verify", f"data.root={out}", "expect=any"]) == 1
    assert "the file is empty" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verfy"], "did you mean verify?"),
        (["tars"], "out=... is missing"),
        (["tars", "ot=/x"], "unknown setting 'ot'; did you mean out?"),
        (["verify", "root=/x"], "did you mean data.root?"),
        (["verify", "data.root=/nowhere"], "has no folder 'train'"),
    ],
)
def test_wrong_usage_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(words)
    assert message in str(caught.value)


def test_a_full_disk_is_a_failure_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = make_archives(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(imagenet, "read_member", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path / "out", train=archives["train"])
    monkeypatch.undo()
    assert prepare(tmp_path / "out", train=archives["train"]) == {"train": 12}


def test_tar_members_with_a_leading_dot_slash_are_fine(tmp_path: Path) -> None:
    inner = tar_of([("./n01440764_1.JPEG", jpeg(1))])
    (tmp_path / "train.tar").write_bytes(tar_of([("./n01440764.tar", inner)]))
    assert prepare(tmp_path / "out", train=tmp_path / "train.tar") == {"train": 1}
