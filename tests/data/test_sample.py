"""The generated sample: always the same, like ImageNet's files, and not learnable from colour."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cl_train.data.decode import Encoded
from cl_train.data.folder import read_folder
from cl_train.data.sample import PATTERNS, SampleSpec, ensure_sample, write_sample
from tests.processes import LIMIT_S

SMALL = SampleSpec(train_per_class=12, val_per_class=4, scale=0.25)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.JPEG"))}


def test_the_same_files_for_any_number_of_processes(tmp_path):
    write_sample(tmp_path / "one", SMALL, processes=1)
    write_sample(tmp_path / "three", SMALL, processes=3)
    files = contents(tmp_path / "one")
    assert len(files) == 10 * (12 + 4) and len(set(files.values())) == len(files)
    assert files == contents(tmp_path / "three")


def _ensure(folder):
    ensure_sample(Path(folder), SMALL)


@pytest.mark.slow
def test_two_runs_at_once_make_one_sample(tmp_path, capfd):
    context = multiprocessing.get_context("spawn")
    runs = [context.Process(target=_ensure, args=(str(tmp_path / "sample"),)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(LIMIT_S)
        assert run.exitcode == 0
    assert len(contents(tmp_path / "sample")) == 160
    bars = [line for line in capfd.readouterr().err.split("\n") if "100%" in line]
    assert len(bars) == 1, "tqdm may write the last state of a bar twice in its line"
    assert {path.name for path in tmp_path.iterdir()} == {"sample", ".sample.lock"}


def test_an_unfinished_or_older_sample_is_made_again(tmp_path):
    folder = tmp_path / "sample"
    (tmp_path / ".sample.writing" / "train").mkdir(parents=True)
    (folder / "train" / "old").mkdir(parents=True)
    (folder / "VERSION").write_text("0\n")
    ensure_sample(folder, SMALL)
    assert read_folder(folder).classes == tuple(sorted(PATTERNS))
    marker = (folder / "VERSION").stat().st_mtime_ns
    ensure_sample(folder, SMALL)
    assert (folder / "VERSION").stat().st_mtime_ns == marker


@pytest.fixture(scope="module")
def sample(cache_home):
    return ensure_sample(cache_home / "cl_train" / "data" / "sample")


@pytest.mark.slow
def test_the_sample_has_imagenets_sizes_and_oddities(sample):
    folder = read_folder(sample)
    assert (len(folder.classes), len(folder.train), len(folder.val)) == (10, 1100, 220)
    kinds: dict[str, int] = {}
    sides, sizes = [], []
    for index in range(len(folder.train)):
        path = folder.train.name(index)
        assert path.endswith(".JPEG")
        with Image.open(path) as image:
            kinds[f"{image.format} {image.mode}"] = kinds.get(f"{image.format} {image.mode}", 0) + 1
            sides.append(image.size)
        sizes.append(Path(path).stat().st_size)
    assert kinds["PNG RGB"] == 1 and kinds["JPEG CMYK"] == 11 and kinds["JPEG L"] == 27
    assert kinds["JPEG RGB"] == 1100 - 1 - 11 - 27
    assert 80_000 < np.mean(sizes) < 120_000
    widths, heights = np.array(sides).T
    assert 440 < widths.mean() < 520 and 340 < heights.mean() < 430 and len(set(sides)) >= 9


@pytest.mark.slow
def test_the_mean_colour_says_nothing_about_the_class(sample):
    """Least squares on the mean of each channel, of every other image: under 20 % of val (chance is 10 %)."""
    folder = read_folder(sample)

    def features(split):
        rows = []
        for index in range(0, len(split), 2):
            pixels = Encoded(split.read(index)).decode().astype(float)
            rows.append([*pixels.mean(axis=(0, 1)), 1])
        return np.array(rows)

    weights, *_ = np.linalg.lstsq(features(folder.train), np.eye(10)[folder.train.labels[::2]], rcond=None)
    guesses = (features(folder.val) @ weights).argmax(axis=1)
    assert (guesses == folder.val.labels[::2]).mean() < 0.2
