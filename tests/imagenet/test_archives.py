"""From the official archives to a folder, hostile archives, and the check of a folder."""

import base64
import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from cl_train.config.schema import ConfigError
from cl_train.data.folder import read_folder
from cl_train.imagenet import archives as imagenet
from cl_train.imagenet.archives import PrepareSettings, prepare
from cl_train.imagenet.devkit import read_mat, synset_ids, validation_labels
from cl_train.imagenet.verify import VerifySettings, verify
from tests.imagenet_archives import HOSTILE, WNIDS, devkit, jpeg, make_archives, mat_file, tar_of, val_wnid

# synsets = struct array 3 x 1 with the official eight fields, by scipy.io.savemat(..., do_compression=True)
SCIPY_MAT = (
    "O+i#lK|&xkE-)ZXK~ybfX>4U6P;6mzW^ZzBIv{Xwb7^=iAVYFxVRU6=Aa8CuAVzX&AWm;~ATlr@F*G_bGCDIeATlsAHUIzs000000000000000000000"
    "00000000000000000000000000000000000000000Bu&4*&oF9033Tc%0*7U|`^2XJB9h(Ll_^00FE}J~I$ALNQPoLvdwZacW61P@aWB5GvjQ#GXFEVL"
    "{GD28KrQo-QB*!u=pL9F*r5r4%Czr03)pqX^`c=Ef&yWagw4rRISJP&hC%@={CUGg33tGfJRZN{SLQ^Wrme6Vp?R8Tf#L77Pggu%Y>f5eb6;CsZ5)KG="
    "iwJ0R(2!J?lNNxuM;pJxCDhK5jaV$9)3GY7=a&MZ+#%dgN;2rJDgfcl4!Iecj5fcV9^i8(n6=|!oPAmbP)3>S!g13da+09ijwAEow^tv_Ij1BLcGP?#PJ"
    "%#r*-$ehviFxb-r2gT{Z63HKg%o#%I0V7<n>1RUIF96s6!5-P1flMC&itSsF"
)


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below `folder`, with the digest of files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


# --- the development kit ----------------------------------------------------------------------------------------------


def test_meta_mat_written_by_scipy_is_read() -> None:
    data = base64.b85decode(SCIPY_MAT)
    assert synset_ids(data) == {1: "n00000011", 2: "n00000007", 3: "n00000009"}
    last = read_mat(data)["synsets"][2]
    assert (
        last["children"] == [1.0, 2.0] and last["words"] == "kit fox, Vulpes" and last["num_train_images"] == [1300.0]
    )


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


@pytest.mark.parametrize("cut", [0, 1, 100, 127, 128, 140, 200, 300])
def test_damaged_meta_mat_is_an_error_not_a_crash(cut: int) -> None:
    with pytest.raises((ValueError, struct.error)):
        synset_ids(mat_file(WNIDS)[:cut])


def test_damaged_kits_are_named(tmp_path: Path) -> None:
    kit = tmp_path / "kit.tar.gz"
    for content in (b"", b"junk", devkit(9)[:-30], devkit(9)[:60]):
        kit.write_bytes(content)
        with pytest.raises(ConfigError, match=r"devkit=.*kit\.tar\.gz"):
            validation_labels(kit)
    (tmp_path / "labels.txt").write_text("n01440764\n../../etc\n")
    with pytest.raises(ConfigError, match="no WordNet id"):
        validation_labels(tmp_path / "labels.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no data/meta\.mat"):
        validation_labels(tmp_path / "empty")


def test_a_kit_that_unpacks_to_gigabytes_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cl_train.imagenet.devkit._MAX_BYTES", 1000)
    (tmp_path / "kit.tar.gz").write_bytes(devkit(9))
    with pytest.raises(ConfigError, match="not the official kit"):
        validation_labels(tmp_path / "kit.tar.gz")


# --- prepare ----------------------------------------------------------------------------------------------------------


def test_the_official_archives_become_a_folder_that_trains(tmp_path: Path) -> None:
    settings = PrepareSettings(root=str(tmp_path / "out"), **make_archives(tmp_path))
    assert prepare(settings) == {"train": 12, "val": 9}
    out = tmp_path / "out"
    assert (out / "train/n01443537/n01443537_2.JPEG").read_bytes() == jpeg(1002)
    assert (out / "val/n01443537/ILSVRC2012_val_00000001.JPEG").read_bytes() == jpeg(-1 % 9999)
    assert not list(out.rglob(".partial"))
    folder = read_folder(out)
    assert folder.classes == WNIDS and len(folder.train) == 12 and len(folder.val) == 9
    before = snapshot(out)
    assert prepare(settings) == {"train": 12, "val": 9}  # again: nothing to do
    assert snapshot(out) == before


def test_interrupted_between_any_two_files_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = make_archives(tmp_path)
    prepare(PrepareSettings(root=str(tmp_path / "reference"), **archives))
    settings = PrepareSettings(root=str(tmp_path / "out"), **archives)
    copy = imagenet._copy_member
    for budget in range(1, 9):
        left = budget

        def copy_some(*arguments: object) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(imagenet, "_copy_member", copy_some)
        try:
            prepare(settings)
        except KeyboardInterrupt:
            continue
    monkeypatch.undo()
    prepare(settings)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "reference")


def test_flat_validation_files_are_moved(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    flat = tmp_path / "out/val"
    flat.mkdir(parents=True)
    with tarfile.open(archives["val"]) as archive:
        archive.extractall(flat, filter="data")
    settings = PrepareSettings(root=str(tmp_path / "out"), val=str(flat), devkit=archives["devkit"])
    assert prepare(settings) == {"val": 9}
    prepare(PrepareSettings(root=str(tmp_path / "reference"), val=archives["val"], devkit=archives["devkit"]))
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "reference")


def test_half_full_class_folders_of_another_program_are_refused(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    (tmp_path / "out/train/n01440764").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not completed by this program, such as n01440764"):
        prepare(PrepareSettings(root=str(tmp_path / "out"), train=archives["train"]))


def test_missing_validation_images_are_named(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    (tmp_path / "kit.tar.gz").write_bytes(devkit(11))
    with pytest.raises(ConfigError, match="2 of 11 images are missing, such as number 10"):
        prepare(PrepareSettings(root=str(tmp_path / "a"), val=archives["val"], devkit=str(tmp_path / "kit.tar.gz")))
    (tmp_path / "kit.tar.gz").write_bytes(devkit(8))
    with pytest.raises(ConfigError, match="image number 9, but there are labels for 1 to 8"):
        prepare(PrepareSettings(root=str(tmp_path / "b"), val=archives["val"], devkit=str(tmp_path / "kit.tar.gz")))


def test_swapped_archives_are_named(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a file named 'ILSVRC2012_val_00000001\.JPEG'"):
        prepare(PrepareSettings(root=str(tmp_path / "out"), train=archives["val"]))


def test_every_wrong_setting_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(PrepareSettings(val=str(tmp_path / "no.tar")))
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="nothing to do"):
        prepare(PrepareSettings(root=str(tmp_path)))


def test_md5_of_other_archives_is_refused(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prepare(PrepareSettings(root=str(tmp_path / "out"), md5=True, **archives))
    assert len(caught.value.problems) == 3 and not (tmp_path / "out").exists()


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = make_archives(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(ConfigError, match="GB needed"):
        prepare(PrepareSettings(root=str(tmp_path / "out"), train=archives["train"]))
    assert snapshot(tmp_path / "out/train") == {}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_archives_write_nothing_outside(tmp_path: Path, kind: str) -> None:
    sandbox = tmp_path / "a/b/c"
    sandbox.mkdir(parents=True)
    (tmp_path / "a/secret").write_text("secret")
    (sandbox / "train.tar").write_bytes(HOSTILE[kind]())
    before = snapshot(tmp_path)
    outside_before = set(os.listdir("/tmp"))
    with pytest.raises(ConfigError, match=r"train\.tar"):
        prepare(PrepareSettings(root=str(sandbox / "out"), train=str(sandbox / "train.tar")))
    after = snapshot(tmp_path)
    created = set(after) - set(before)
    assert all(path.startswith("a/b/c/out") for path in created)
    assert {path: after[path] for path in before} == before
    assert "n01440764_2.JPEG" not in set(os.listdir("/tmp")) - outside_before
    written = [path for path in (sandbox / "out").rglob("*") if not path.is_dir()]
    assert all(path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1 for path in written)
    assert all(jpeg(1) == path.read_bytes() or ".partial" in path.parts or path.name == ".done" for path in written)
    assert not (sandbox / "out/train/n01440764").exists()


def test_after_a_damaged_archive_a_good_one_continues(tmp_path: Path) -> None:
    good = Path(make_archives(tmp_path)["train"])
    whole = good.read_bytes()
    good.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ConfigError, match="download it again"):
        prepare(PrepareSettings(root=str(tmp_path / "out"), train=str(good)))
    good.write_bytes(whole)
    assert prepare(PrepareSettings(root=str(tmp_path / "out"), train=str(good))) == {"train": 12}


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare(PrepareSettings(root=str(tmp_path / "out"), **make_archives(tmp_path)))
    return tmp_path / "out"


def check(root: Path, deep: bool = False, expect: str = "any") -> tuple[dict[str, int], str]:
    report = verify(VerifySettings(root=str(root), deep=deep, expect=expect, workers=1))
    return report.images, "\n".join(report.problems)


@pytest.mark.parametrize("deep", [False, True])
def test_a_good_folder_has_no_problems(prepared: Path, deep: bool) -> None:
    assert check(prepared, deep) == ({"train": 12, "val": 9}, "")


def test_counts_are_those_of_imagenet_unless_told_otherwise(prepared: Path) -> None:
    _, problems = check(prepared, expect="imagenet")
    for text in (
        "train: 3 classes, ILSVRC2012 has 1,000",
        "train: 12 images, ILSVRC2012 has 1,281,167",
        "val: 9 images",
    ):
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
        "5 files are no usable images",
        "n01440764_0.JPEG: the file is empty",
        "n01440764_1.JPEG: neither a JPEG nor a PNG",
        "notes.txt: not named like an image",
        "link.JPEG: No such file",
        "fifo.JPEG: not a regular file",
    ):
        assert text in problems


def test_files_that_went_missing_are_noticed_by_the_marker(prepared: Path) -> None:
    (prepared / "train/n01440764/n01440764_3.JPEG").unlink()
    assert "train: 1 files are gone since they were unpacked, such as from n01440764" in check(prepared)[1]


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


def test_a_png_named_jpeg_is_a_note(prepared: Path) -> None:
    Image.new("RGB", (8, 8)).save(prepared / "train/n01440764/n01440764_9.JPEG", "PNG")
    report = verify(VerifySettings(root=str(prepared), deep=True, expect="any", workers=1))
    assert report.problems == [] and "1 PNG named .JPEG" in report.notes[0]


# --- the program ------------------------------------------------------------------------------------------------------


def program(*words: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).resolve().parents[2] / "scripts/prepare_imagenet.py"
    return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=60)


def test_the_program_unpacks_and_verifies(tmp_path: Path) -> None:
    archives = make_archives(tmp_path)
    words = [f"{key}={value}" for key, value in archives.items()]
    result = program("tars", f"root={tmp_path / 'out'}", *words)
    assert result.returncode == 0 and "train: 12 images" in result.stdout
    result = program("verify", f"root={tmp_path / 'out'}", "expect=any", "--deep")
    assert result.returncode == 0 and result.stdout.endswith("all is well\n")
    (tmp_path / "out/train/n01440764/n01440764_0.JPEG").write_bytes(b"")
    result = program("verify", f"root={tmp_path / 'out'}", "expect=any")
    assert result.returncode == 1 and "the file is empty" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verfy"], "did you mean verify?"),
        (["tars"], "root=FOLDER is missing"),
        (["tars", "rot=/x"], "unknown setting 'rot'; did you mean root?"),
        (["verify", "root=/nowhere"], "has no folder 'train'"),
    ],
)
def test_wrong_usage_is_told_in_one_line(words: list[str], message: str) -> None:
    result = program(*words)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_full_disk_is_a_failure_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = make_archives(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(imagenet, "_copy_member", full)
    settings = PrepareSettings(root=str(tmp_path / "out"), train=archives["train"])
    with pytest.raises(OSError, match="No space left"):
        prepare(settings)
    monkeypatch.undo()
    assert prepare(settings) == {"train": 12}


def test_tar_members_with_a_leading_dot_slash_are_fine(tmp_path: Path) -> None:
    inner = tar_of([("./n01440764_1.JPEG", jpeg(1))])
    (tmp_path / "train.tar").write_bytes(tar_of([("./n01440764.tar", inner)]))
    assert prepare(PrepareSettings(root=str(tmp_path / "out"), train=str(tmp_path / "train.tar"))) == {"train": 1}
