"""Two ranks on gloo: they stay equal, stop together, and only rank 0 needs the run folder.

`main` runs in both of two forked processes, and what it asserts holds in both.
"""

import os
import shutil
from functools import partial

import pytest
import torch

from cl_train.config.validation import checked_config
from cl_train.errors import ConfigError
from cl_train.system.distributed import processes
from cl_train.training import build
from cl_train.training.loop import train
from tests.conftest import Run, write_images
from tests.networks import small
from tests.ranks import run_two_ranks
from tests.training.test_evaluation import check_report

pytestmark = pytest.mark.slow


def settings(folder, data=None, **changes):
    images = {"name": "folder", "root": str(folder / "images"), "image_size": 32, "workers": 0}
    words = {"model": "tests.networks:small", "device": "cpu", "precision": "fp32", "epochs": 2}
    words |= {"batch_size": 8, "log_every": 1, "log_to": [], "data": images | (data or {})}
    return checked_config(words | changes)


def run(folder, name, **changes):
    return train(settings(folder, **changes), folder / name).exit_code


def other_settings_and_layouts_are_refused(folder):
    with pytest.raises(ConfigError, match=r"optim\.lr is 0\.1 on rank 0 and 1\.1 on rank 1"):
        run(folder, "other", optim={"lr": 0.1 + int(os.environ["RANK"])})
    with (
        processes("cpu") as dist,
        pytest.raises(ConfigError, match=r"layout of 0\.weight is .* on rank 1"),
    ):
        model = small(3).to(memory_format=(torch.contiguous_format, torch.channels_last)[dist.rank])
        build.wrap_in_ddp(model, dist, static_graph=False)


def main(folder):
    saving = {"checkpoint": {"every_epochs": 0, "keep": 9}, "evaluate_every": -1}
    assert run(folder, "dropout", max_steps=1, report=True) == 0
    other_settings_and_layouts_are_refused(folder)
    assert run(folder, "one-image", max_steps=1, data={"root": str(folder / "lone")}) == 0
    with pytest.raises(ConfigError, match=r"takes 66 images .* 48 training images: batch_size=24"):
        run(folder, "too-few", batch_size=33)
    for name, code, more in (
        ("terminated_in_training", 143, {}),
        ("terminated_in_evaluation", 143, {"batch_size": 4}),
        ("asked_to_save", 0, saving),
    ):
        assert run(folder, name, model=f"tests.networks:{name}", **more) == code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-ranks")
    write_images(folder / "images", {"train": 16, "val": 7})
    shutil.copytree(folder / "images/train", folder / "lone/train")
    (folder / "lone/val/red").mkdir(parents=True)
    shutil.copy(folder / "images/val/red/000.JPEG", folder / "lone/val/red")
    run_two_ranks(folder, partial(main, folder))
    return folder


def test_random_numbers_differ_and_the_report_has_the_images_of_both_ranks(folder):
    done, images = Run(folder / "dropout", 0), folder / "images" / "val"
    saved = done.checkpoint("step-00000001.pt")["progress"]["ranks"]
    assert len(saved) == 2 and not torch.equal(saved[0]["random"]["cpu"], saved[1]["random"]["cpu"])
    names = [figure["name"] for figure in check_report(done, 21)]
    assert sorted(names) == sorted(map(str, images.glob("*/*")))


def test_fewer_validation_images_and_classes_than_ranks(folder):
    done = Run(folder / "one-image", 0)
    (record,) = done.records("val")
    assert record["images"] == 1 and record["balanced_accuracy"] == record["top1"] in (0.0, 100.0)
    assert "no validation images of 2 of 3 classes: blue, green" in done.log


def test_a_run_with_other_settings_leaves_no_record(folder):
    assert not (folder / "other" / "metrics.jsonl").exists()


def test_a_signal_to_one_rank_reaches_both(folder):
    for case, steps in (("training", 2), ("evaluation", 6)):
        stopped = Run(folder / f"terminated_in_{case}", 143)
        assert (stopped.summary["status"], stopped.summary["steps"]) == ("interrupted", steps)
        assert stopped.checkpoint(f"step-{steps:08d}.pt") and stopped.records("val") == []
    names = {path.name for path in (folder / "asked_to_save" / "checkpoints").iterdir()}
    assert names == {"step-00000002.pt", "step-00000006.pt"}, "USR1 saves, and training continues"
