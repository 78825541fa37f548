"""The generated sample: always the same, of ImageNet's proportions."""

import numpy as np
import pytest

from cl_train.data.decode import EncodedImage
from cl_train.data.images import list_folder
from cl_train.data.sample import (
    PATTERNS,
    SampleSpec,
    ensure_sample,
    write_sample,
)
from cl_train.errors import ConfigError
from tests.conftest import contents

SMALL = SampleSpec(train_per_class=12, val_per_class=4, scale=0.25)


@pytest.mark.slow
def test_the_same_files_for_any_number_of_processes(tmp_path):
    write_sample(tmp_path / "one", SMALL, processes=1)
    write_sample(tmp_path / "three", SMALL, processes=3)
    files = contents(tmp_path / "one")
    images = {content for name, content in files.items() if name.endswith(".JPEG")}
    assert len(images) == 10 * (12 + 4) and files == contents(tmp_path / "three")


def test_an_unfinished_or_older_sample_is_made_again_but_no_folder_of_somebody_else(tmp_path):
    folder = tmp_path / "sample"
    (tmp_path / ".sample.writing/train").mkdir(parents=True)
    (folder / "train/old").mkdir(parents=True)
    (folder / "VERSION").write_text("0\n")
    made = [(ensure_sample(folder, SMALL) / "VERSION").stat().st_mtime_ns for _ in range(2)]
    assert list_folder(folder).classes == tuple(sorted(PATTERNS)) and made[0] == made[1]
    (tmp_path / "other/train/mine").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not the sample data"):
        ensure_sample(tmp_path / "other", SMALL)
    assert (tmp_path / "other/train/mine").is_dir()


def test_the_files_have_imagenets_proportions(tmp_path):
    write_sample(tmp_path, SampleSpec(train_per_class=3, val_per_class=0))
    files = list(tmp_path.rglob("*.JPEG"))
    sizes = [path.stat().st_size for path in files]
    assert len(files) == 30 and 70_000 < np.mean(sizes) < 120_000
    widths = [EncodedImage(path.read_bytes()).width for path in files]
    assert len(set(widths)) >= 3 and abs(np.mean(widths) / 480 - 1) < 0.1
