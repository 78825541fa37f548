"""on_bad_image=skip refuses at the start what it would otherwise shrink in silence."""

from pathlib import Path

import pytest

from cl_train.config.schema import ConfigError
from cl_train.data import file_check
from cl_train.data.file_check import check_files, why_no_image
from cl_train.data.folder import read_folder
from tests.data.image_folders import jpeg


def write_folder(root: Path) -> Path:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (root / split / name).mkdir(parents=True)
            for number in range(6):
                (root / split / name / f"{number}.jpg").write_bytes(jpeg())
    return root


def test_too_many_files_that_are_no_images(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    for number, content in enumerate((b"", b"<html>", b"GIF89a")):
        (root / "train" / "ant" / f"{number}.jpg").write_bytes(content)
    check_files(read_folder(root), max_bad_images=3)
    with pytest.raises(ConfigError, match=r"3 of 12 .*max_bad_images=2.*ant/0\.jpg.*empty"):
        check_files(read_folder(root), max_bad_images=2)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_without_an_image(tmp_path: Path, split: str) -> None:
    root = write_folder(tmp_path)
    for path in (root / split / "bee").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no file of bee is an image"):
        check_files(read_folder(root), max_bad_images=100)


def test_a_part_of_a_large_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_check, "_CHECKED", 8)
    root = write_folder(tmp_path)
    for path in (root / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    check_files(read_folder(root), max_bad_images=8)
    with pytest.raises(ConfigError, match="8 of 8"):
        check_files(read_folder(root), max_bad_images=7)


def test_why_a_file_is_no_image(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    assert why_no_image(path.as_posix()) is not None
    path.write_bytes(jpeg())
    assert why_no_image(path.as_posix()) is None
    assert why_no_image(tmp_path.as_posix()) is not None
