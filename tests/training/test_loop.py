"""The real loop, shrunk: real JPEGs in, records and a trained model out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
import yaml

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import load, to_mapping
from cl_train.training import loop
from cl_train.training.loop import check_runs
from cl_train.training.progress import TrainingFault
from tests.conftest import CPU_PRECISIONS, Run, write_images

Train = Callable[..., Run]

SUMMARY_KEYS = {
    *("schema_version", "status", "command", "seed", "model", "memory_format", "channels_last_requested", "precision"),
    *("compile", "device", "device_name", "world_size", "global_batch_size", "image_size", "epochs", "steps"),
    *("images_seen", "images_per_s", "step_ms", "data_wait_pct", "peak_memory_gib", "train", "val", "amp"),
    *("environment", "others_pct", "skipped_images", "git", "best", "started", "ended", "seconds"),
}


def test_a_run_trains_and_leaves_its_records(train: Train) -> None:
    done = train("channels_last=true")
    assert done.exit_code == 0
    summary = done.summary
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["status"], summary["schema_version"]) == ("completed", 1)
    assert (summary["memory_format"], summary["channels_last_requested"]) == ("channels_last", "true")
    assert (summary["steps"], summary["images_seen"], summary["global_batch_size"]) == (6, 192, 32)
    assert summary["val"]["images"] == 21 and summary["val"]["top1"] > 90 and summary["val"]["top5"] == 100
    assert summary["images_per_s"]["end_to_end"]["windows"] == 5, "the warm-up window is left out"
    assert summary["images_per_s"]["end_to_end"]["median"] > 0 and summary["images_per_s"]["compute"] is None
    assert summary["environment"].keys() == {"torch", "torchvision", "python", "cuda", "cudnn", "cpu", "driver"}
    assert [record["step"] for record in done.records("train")] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in done.records("val")] == [3, 6]
    assert done.losses[-1] < done.losses[0]
    saved = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert to_mapping(load(saved)) == saved
    assert {path.name for path in (done.folder / "checkpoints").glob("*.pt")} >= {"step-00000006.pt", "best.pt"}
    best = max(done.records("val"), key=lambda record: record["top1"])
    assert summary["best"] == {"top1": best["top1"], "epoch": best["epoch"]}
    assert summary["ended"] >= summary["started"] and summary["seconds"] > 0
    text = (done.folder / "train.log").read_text()
    assert "96 training and 21 validation images of 3 classes, 32 px; 0.0" in text
    assert "2 epochs of 3 steps, 32 images per step\n" in text
    assert re.findall(r"Epoch: .* ETA (\d+:\d\d)", text)[-1] == "0:00" and "-m channels_last=true,false" in text
    assert f"best top-1 {best['top1']:.2f} % after epoch {best['epoch']}: {done.folder / 'checkpoints/best.pt'}" in text


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", ["true", "false"])
@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_each_precision_and_layout_trains(train: Train, precision: str, channels_last: str) -> None:
    done = train(f"precision={precision}", f"channels_last={channels_last}", "epochs=1")
    summary = done.summary
    assert summary["precision"] == precision
    assert summary["memory_format"] == ("channels_last" if channels_last == "true" else "contiguous")
    assert done.losses[-1] < done.losses[0]
    scaled = precision.startswith("fp16")
    assert (summary["amp"]["scale"] is not None) == scaled
    weight = done.checkpoint()["model"]["3.weight"]
    assert weight.stride() == (72, 9, 3, 1), "on disk always contiguous"
    assert weight.dtype == torch.float32


@pytest.mark.slow
def test_two_runs_with_one_seed_have_the_same_losses(train: Train) -> None:
    assert train().losses == train().losses
    assert train("seed=1").losses != train("seed=2").losses


@pytest.mark.slow
def test_layouts_have_the_same_losses_in_fp32(train: Train) -> None:
    runs = [train(f"channels_last={value}", "epochs=7", "optim.lr=0.1") for value in ("false", "true")]
    assert len(runs[0].losses) == 21
    assert runs[1].losses[:20] == pytest.approx(runs[0].losses[:20], rel=1e-4)


@pytest.mark.slow
def test_other_classes_and_counts_need_no_change_but_the_root(train: Train, tmp_path: Path) -> None:
    root = tmp_path / "other"
    write_images(root, {"train": 40, "val": 3})
    for split in ("train", "val"):
        (root / split / "red").rename(root / split / "ein anderer Name")
    done = train(f"data.root={root}")
    assert done.summary["val"]["images"] == 9
    assert done.checkpoint()["facts"]["classes"] == ["blue", "ein anderer Name", "green"]


@pytest.mark.slow
def test_synthetic_data_measures_the_computation(train: Train) -> None:
    done = train("data=synthetic", "data.synthetic_images=96", "data.synthetic_classes=3", "evaluate_every=-1")
    speeds = done.summary["images_per_s"]
    assert speeds["compute"] == speeds["end_to_end"] and done.summary["val"] is None
    waits_pct = [record["data_wait_pct"] for record in done.records("train")]
    assert median(waits_pct) < 10 and min(waits_pct) <= done.summary["data_wait_pct"] <= max(waits_pct)


def test_augmentation_averaging_clipping_accumulation_and_smoothing_together(train: Train) -> None:
    done = train(
        *("augment=strong", "ema_decay=0.5", "optim=adamw", "optim.clip_norm=1", "accumulate_steps=3", "batch_size=8"),
        *("label_smoothing=0.1", "schedule=linear", "schedule.warmup_epochs=0.5", "optim.lr=0.01"),
    )
    assert done.summary["global_batch_size"] == 24 and done.summary["steps"] == 8
    assert done.records("val_average")[-1]["images"] == 21
    assert done.checkpoint()["average"]["3.weight"].shape == (16, 8, 3, 3)
    rates = [record["lr"] for record in done.records("train")]
    assert rates.index(max(rates)) == 2, "the warm-up ends after half an epoch of four steps"


def test_max_steps_ends_in_mid_epoch_and_resume_goes_on_exactly(train: Train, tmp_path: Path) -> None:
    whole = train("precision=fp16")
    folder = tmp_path / "parts"
    train("precision=fp16", "max_steps=4", folder=folder)
    done = train("precision=fp16", "resume=auto", folder=folder)
    assert [record["step"] for record in done.records("train")] == [1, 2, 3, 4, 5, 6]
    assert done.losses == whole.losses
    for name, value in whole.checkpoint()["model"].items():
        assert torch.equal(done.checkpoint()["model"][name], value), name


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_resumes_in_the_other(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    whole = train("channels_last=false")
    train("channels_last=false", "max_steps=3", folder=folder)
    done = train("channels_last=true", "resume=auto", folder=folder)
    assert done.summary["memory_format"] == "channels_last"
    assert done.losses == pytest.approx(whole.losses, rel=1e-4)


def test_evaluate_only_gives_the_checkpoints_accuracy(train: Train, tmp_path: Path) -> None:
    trained = train()
    done = train("evaluate_only=true", f"resume={trained.folder}")
    assert done.summary["val"] == trained.summary["val"] and done.summary["steps"] == 6
    assert done.records("train") == []


def test_an_evaluation_needs_its_split_and_leaves_the_records_of_the_run(
    train: Train, image_folder: Path, tmp_path: Path
) -> None:
    trained = train("ema_decay=0.5")
    before = {path: path.read_bytes() for path in trained.folder.rglob("*") if path.is_file()}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/test").symlink_to(image_folder / "val")
    words = ["evaluate_only=true", f"data.root={tmp_path}/data", "batch_size=5", "optim=adamw", "ema_decay=0.5"]
    for resume in ("auto", f"{trained.folder}/checkpoints/best.pt"):
        train(*words, f"resume={resume}", folder=trained.folder)
        evaluated = json.loads((trained.folder / "evaluation/summary.json").read_text())
        assert evaluated["val"] == pytest.approx(trained.summary["val"]) and evaluated["data"] == "folder"
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ConfigError, match="no folder 'val'"):
        train(*words, f"data.root={tmp_path}", f"resume={trained.folder}")
    with pytest.raises(ConfigError, match="num_classes"):
        train("evaluate_only=true", "data=synthetic", f"resume={trained.folder}")


def test_a_run_is_not_continued_and_deleted_at_once(train: Train, tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="leave out one"):
        tiny("resume=auto", "overwrite=true")
    trained = train("epochs=1")
    with pytest.raises(ConfigError, match="leave out one"):
        train(f"resume={trained.folder}/checkpoints/best.pt", "overwrite=true", folder=trained.folder)
    assert (trained.folder / "checkpoints/best.pt").is_file() and trained.summary["status"] == "completed"


def test_a_nan_stops_the_run_and_names_the_step(train: Train, tmp_path: Path) -> None:
    with pytest.raises(TrainingFault, match="the loss is nan at step 3 on rank 0"):
        train("model=tests.networks:nan_at_third_step", "log_every=2", folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "step 3" in summary["why"]
    assert "the run failed: the loss is nan at step 3" in (tmp_path / "train.log").read_text()


def test_the_first_error_is_reported_if_the_device_fails(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(run: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(loop, "log_submitted", failing)
    with pytest.raises(TrainingFault, match="step 3"):
        train("model=tests.networks:nan_at_third_step", folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "step 3" in summary["why"]


def test_a_nan_is_skipped_when_asked(train: Train) -> None:
    done = train("model=tests.networks:nan_at_third_step", "on_nonfinite=skip")
    assert done.exit_code == 0 and done.summary["amp"]["skipped_steps"] == 1
    assert done.losses[2] is None and done.losses[5] is not None


@pytest.mark.slow
def test_a_profile_is_left(train: Train) -> None:
    done = train("profile=true", "epochs=4")
    assert (done.folder / "trace.json.gz").stat().st_size > 1000
    assert "aten::" in (done.folder / "operators.txt").read_text()


@pytest.mark.slow
def test_a_compiled_run_has_the_eager_losses(train: Train, without_inductor: None) -> None:
    eager, compiled = train("epochs=1"), train("epochs=1", "compile=true")
    assert compiled.summary["compile"] is True
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)


def test_a_batch_larger_than_the_data_is_refused(train: Train) -> None:
    with pytest.raises(ConfigError, match="96 training images"):
        train("batch_size=128")
    with pytest.raises(ConfigError, match="one step takes 128 images"):
        train("batch_size=32", "accumulate_steps=4")


def test_every_run_of_a_sweep_is_checked(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError) as caught:
        timm = tiny("augment.policy=timm", "augment.timm_policy=nonsense")
        v0 = tiny("augment.policy=timm", "augment.timm_policy=v0")
        check_runs([tiny("model=resnet18"), tiny("model=resnt18"), tiny("model=vgg99"), timm, v0])
    assert len(caught.value.problems) == 4


def test_the_best_is_kept_also_where_no_checkpoint_is_due(train: Train) -> None:
    done = train("checkpoint.every_epochs=0", "epochs=3", "optim.lr=0.4")
    best = max(record["top1"] for record in done.records("val"))
    first = next(record["step"] for record in done.records("val") if record["top1"] == best)
    assert done.checkpoint("best.pt")["progress"]["step"] == first


@pytest.mark.slow
def test_the_same_command_after_the_end_changes_nothing(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    first = train("resume=auto", folder=folder).summary
    again = train("resume=auto", folder=folder).summary
    same = ("status", "steps", "images_seen", "images_per_s", "step_ms", "data_wait_pct", "train", "val")
    assert {name: again[name] for name in same} == {name: first[name] for name in same}


def test_nothing_to_evaluate_is_refused(train: Train) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        train("evaluate_only=true", "resume=auto")


@pytest.mark.slow
def test_a_bad_image_ahead_of_the_step_does_not_count_in_the_evaluation(train: Train, tmp_path: Path) -> None:
    """The epoch ends before its last batches, which the loader had prepared already: one holds a broken file."""
    images = tmp_path / "images"
    write_images(images, {"train": 32, "val": 7})
    for number in range(0, 32, 4):
        (images / "train" / "red" / f"{number:03d}.JPEG").write_bytes(b"\xff\xd8 no picture")
    words = (f"data.root={images}", "data.on_bad_image=skip", "max_steps=5", "batch_size=8", "epochs=1")
    for workers in (0, 1):
        done = train(*words, f"data.workers={workers}")
        assert done.exit_code == 0 and done.summary["val"]["images"] == 21


@pytest.mark.slow
def test_a_batch_of_bad_validation_images_does_not_spoil_the_loss(train: Train, tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_images(images, {"train": 32, "val": 7})
    (images / "val" / "red" / "006.JPEG").write_bytes(b"")
    words = (f"data.root={images}", "data.on_bad_image=skip", "batch_size=4", "max_steps=2")
    done = train(*words)
    assert done.summary["val"]["images"] == 20 and done.summary["val"]["loss"] > 0
    for path in (images / "val").rglob("*.JPEG"):
        path.write_bytes(b"\xff\xd8\xff broken")
    with pytest.raises(TrainingFault, match="none of the 21 validation images"):
        train(*words)


@pytest.mark.parametrize(("name", "said"), [("too_few_outputs", "for 3 classes"), ("raising", "planted")])
def test_a_users_model_that_cannot_train_is_refused_before_the_first_step(train: Train, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"model=tests.networks:{name} cannot train .*{said}.*networks.py|{said}"):
        train(f"model=tests.networks:{name}")


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", ["false", "auto"])
def test_a_users_model_that_deepcopy_refuses_trains(train: Train, quick_auto: None, channels_last: str) -> None:
    done = train("model=tests.networks:uncopyable", f"channels_last={channels_last}")
    assert done.exit_code == 0 and done.summary["status"] == "completed"
