"""Every task refuses an output that holds something else, and changes nothing in it."""

import pytest

from cl_train.commands.prepare_imagenet import main
from cl_train.data.prepare.folders import resumable_folder
from cl_train.errors import ConfigError
from tests.conftest import contents
from tests.data.image_folders import write_folder
from tests.imagenet_archives import make_archives


@pytest.fixture
def inputs(tmp_path):
    root = tmp_path / "in"
    write_folder(root / "images", train=6, val=4)
    make_archives(root / "archives")
    (root / "file").write_text("kept")
    (root / "notes").mkdir()
    (root / "notes" / "a.txt").write_text("kept")
    return root


def words(task, root):
    if task == "tars":
        names = {"train": "img_train.tar", "val": "img_val.tar", "devkit": "devkit_t12.tar.gz"}
        return [task, *(f"{key}={root}/archives/ILSVRC2012_{name}" for key, name in names.items())]
    return [task, f"data.root={root}/images"]


ARCHIVE = "archives/ILSVRC2012_img_train.tar"
TASKS = ("tars", "resize", "shards")
FOREIGN = ("file", "notes", "images/train/class_0", "file/below")


@pytest.mark.parametrize("task", TASKS)
def test_foreign_outputs_are_refused_unchanged(inputs, task):
    before = contents(inputs)
    inside = {"resize": ["images/new"], "shards": ["images/train/new", "images/val/new"]}
    for out in [*FOREIGN, *inside.get(task, [])]:
        with pytest.raises(ConfigError, match="out="):
            main([*words(task, inputs), f"out={inputs / out}"])
        assert contents(inputs) == before, out


@pytest.mark.parametrize(("task", "name"), [("tars", ARCHIVE), ("shards", "images/val")])
def test_a_failure_leaves_nothing_that_counts(inputs, task, name):
    if task == "tars":
        (inputs / name).write_bytes((inputs / name).read_bytes()[:1000])
    else:
        (inputs / name).rename(inputs / "moved")
    before, new = contents(inputs), inputs / "new"
    with pytest.raises(ConfigError):
        main([*words(task, inputs), f"out={new}"])
    assert {*contents(inputs)} - {*before} <= {"new", "new/.settings.json", "new/.settings.lock"}
    with resumable_folder(new, {"task": task, "other": 1}, overwrite=False):
        pass
