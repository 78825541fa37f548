"""The smaller copy of a folder."""

import io

import numpy as np
import pytest
from PIL import Image

from cl_train.data.images import list_folder
from cl_train.data.prepare.resize import resize_folder
from cl_train.errors import ConfigError
from tests.data.image_folders import encoded, jpeg, noise


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    for folder in (root / "train/a", root / "val/a"):
        folder.mkdir(parents=True)
        (folder / "large.JPEG").write_bytes(encoded(noise(300, 500), quality=95))
        (folder / "tall.jpg").write_bytes(encoded(noise(500, 100), quality=95))
        (folder / "small.jpg").write_bytes(jpeg(40, 60))
        (folder / "cmyk.jpg").write_bytes(encoded(noise(40, 60).convert("CMYK")))
        (folder / "really_png.JPEG").write_bytes(encoded(noise(220, 210), "PNG"))
    return root


def picture(path):
    return Image.open(io.BytesIO(path.read_bytes()))


def sizes(root):
    return {path.name: picture(path).size for path in (root / "train/a").iterdir()}


def test_layout_names_sizes_and_content(source, tmp_path):
    report = resize_folder(source, tmp_path / "copy", max_side=200, workers=2)
    assert report.startswith("10 images written, 0 existed") and "cannot be" not in report
    kept = {"cmyk.jpg": (60, 40), "small.jpg": (60, 40)}
    changed = {"large.JPEG": (200, 120), "really_png.JPEG": (191, 200), "tall.jpg": (40, 200)}
    assert sizes(tmp_path / "copy") == kept | changed
    assert list_folder(tmp_path / "copy").fingerprint == list_folder(source).fingerprint
    for path in (tmp_path / "copy").rglob("*.jp*g"):
        assert (picture(path).format, picture(path).mode) == ("JPEG", "RGB")
    small = "train/a/small.jpg"
    assert (tmp_path / "copy" / small).read_bytes() == (source / small).read_bytes()
    resize_folder(source, tmp_path / "short", short_side=80, workers=1)
    short = sizes(tmp_path / "short")
    assert short["large.JPEG"] == (133, 80) and short["tall.jpg"] == (80, 400)
    with pytest.raises(ConfigError, match="not both"):
        resize_folder(source, tmp_path / "both", max_side=9, short_side=9)
    name = "train/a/large.JPEG"
    assert np.abs(thumbnail(tmp_path / "copy" / name) - thumbnail(source / name)).mean() < 1.5


def thumbnail(path):
    """Brightness only: JPEG's colour subsampling loses more than the resize."""
    grey = picture(path).convert("L")
    return np.asarray(grey.resize((40, 24), Image.Resampling.BOX), dtype=float)


def test_a_second_run_continues_and_bad_images_are_left_out(source, tmp_path):
    copy = tmp_path / "copy"
    resize_folder(source, copy, max_side=200, workers=1)
    kept = (copy / "train/a/large.JPEG").stat().st_mtime_ns
    (copy / "val/a/large.JPEG").unlink()
    (copy / "val/a/tall.jpg").rename(copy / "val/a/.tall.jpg.part")  # as a killed run leaves it
    (source / "train/a/broken.jpg").write_bytes(jpeg()[:300])
    report = resize_folder(source, copy, max_side=200, workers=2)
    assert report.startswith("2 images written, 8 existed already")
    assert f"cannot be decoded: 1 image:\n{source}/train/a/broken" in report
    assert (copy / "train/a/large.JPEG").stat().st_mtime_ns == kept
    assert not list(copy.rglob(".*.part")) and not (copy / "train/a/broken.jpg").exists()
