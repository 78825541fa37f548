"""The real loop, shrunk: real JPEGs in, records and a trained model out."""

import csv
import json
import logging
import math
import os
import re
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from cl_train.config.validation import checked_config
from cl_train.errors import BadImageError, ConfigError, TrainingFault
from cl_train.sweeps.verdict import compare_pair
from cl_train.system.distributed import Dist
from cl_train.system.run_folder import read_run
from cl_train.training.active_run import count_bad_steps
from cl_train.training.console import RunLog
from cl_train.training.plan import Plan
from cl_train.training.setup import check_runs, prepare_process
from tests import networks
from tests.conftest import Run, write_images

SUMMARY_KEYS = """
    schema_version status command seed model memory_format channels_last_requested precision
    compile device device_name world_size global_batch_size image_size epochs steps images_seen
    images_per_s step_ms data_wait_pct peak_memory_gib train val amp environment others_pct lost_pct
    skipped_images git best started ended seconds
"""
ENVIRONMENT_KEYS = "torch torchvision python cuda cudnn cpu driver"


def test_a_run_trains_and_leaves_its_records_and_the_same_command_changes_nothing(train):
    done = train("channels_last=true")
    assert done.exit_code == 0
    summary = done.summary
    assert summary.keys() >= {*SUMMARY_KEYS.split()}
    assert (summary["status"], summary["schema_version"]) == ("completed", 1)
    assert summary["channels_last_requested"] == "true"
    assert (summary["steps"], summary["images_seen"], summary["global_batch_size"]) == (6, 192, 32)
    assert summary["val"]["top5"] == 100
    speeds, environment = summary["images_per_s"], summary["environment"]
    assert speeds["end_to_end"]["windows"] == 5, "the warm-up window is left out"
    assert speeds["end_to_end"]["median"] > 0 and speeds["compute"] is None
    assert environment.keys() == {*ENVIRONMENT_KEYS.split()}
    saved = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert asdict(checked_config(saved)) == saved
    checkpoints = {path.name for path in (done.folder / "checkpoints").glob("*.pt")}
    assert checkpoints >= {"step-00000006.pt", "best.pt"}
    best = max(done.records("val"), key=lambda record: record["top1"])
    assert summary["best"] == {"top1": best["top1"], "epoch": best["epoch"]}
    assert summary["ended"] >= summary["started"] and summary["seconds"] > 0
    text = done.log
    assert "96 training and 21 validation images of 3 classes, 32 px; 0.0" in text
    assert re.findall(r"Epoch: .* ETA (\d+:\d\d)", text)[-1] == "0:00"
    assert "-m channels_last=true,false" in text
    said = f"best top-1 {best['top1']:.2f} % after epoch {best['epoch']}: {done.folder}"
    assert f"{said}/checkpoints/best.pt" in text
    repeated = train("channels_last=true", "resume=auto", folder=done.folder)
    assert "nothing is left to do: the run ended with step 6\n" in repeated.log
    assert repeated.summary == summary == json.loads((done.folder / "summary.json").read_text())


@pytest.mark.slow
def test_losses_depend_on_the_seed_not_on_the_layout(train, tmp_path, without_inductor):
    long = partial(train, "epochs=7", "optim.lr=0.1")
    whole, folder = long(), tmp_path / "parts"
    assert len(whole.losses) == 21 and long().losses == whole.losses
    assert long("seed=2", "max_steps=3").losses != whole.losses[:3]
    long("max_steps=3", folder=folder)
    resumed = long("channels_last=true", "resume=auto", folder=folder)
    for done in (long("channels_last=true"), resumed):
        assert done.losses[:20] == pytest.approx(whole.losses[:20], rel=1e-4)
        assert done.summary["memory_format"] == "channels_last"
    compiled = long("max_steps=3", "compile=true")
    assert compiled.summary["compile"] is True
    assert compiled.losses == pytest.approx(whole.losses[:3], rel=1e-4)


@pytest.mark.slow
def test_a_run_is_profiled_and_synthetic_data_measures_the_computation(train):
    done = train("profile=true", "epochs=4")
    assert (done.folder / "trace.json.gz").stat().st_size > 1000
    assert "aten::" in (done.folder / "operators.txt").read_text()

    synthetic = "data=synthetic data.synthetic_images=96 data.synthetic_classes=3"
    done = train(*synthetic.split(), "evaluate_every=-1")
    speeds = done.summary["images_per_s"]
    assert speeds["compute"] == speeds["end_to_end"] and done.summary["val"] is None
    waits_pct = [record["data_wait_pct"] for record in done.records("train")]
    assert min(waits_pct) <= done.summary["data_wait_pct"] <= max(waits_pct)


def test_many_settings_together_and_a_best_checkpoint_that_is_not_due(train):
    words = (
        "augment=strong ema_decay=0.5 optim=adamw optim.clip_norm=1 accumulate_steps=3 batch_size=8"
        " label_smoothing=0.1 schedule=linear schedule.warmup_epochs=0.5 optim.lr=0.01"
        " checkpoint.every_epochs=0"
    )
    done = train(*words.split())
    best = max(done.records("val"), key=lambda record: record["top1"])  # the first of equal ones
    assert done.saved_step("best.pt") == best["step"]
    assert done.summary["global_batch_size"] == 24 and done.summary["steps"] == 8
    assert done.records("val_average")[-1]["images"] == 21
    assert done.checkpoint()["average"]["3.weight"].shape == (16, 8, 3, 3)
    rates = [record["lr"] for record in done.records("train")]
    assert rates.index(max(rates)) == 2, "the warm-up ends after half an epoch of four steps"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16_o2"])
def test_max_steps_ends_in_mid_epoch_and_resume_goes_on_exactly(
    train, tmp_path, precision, monkeypatch
):
    """Random generators (dropout), the loss scale and AdamW's moments are restored."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=2))
    words = (f"precision={precision}", "data.image_size=16")
    words += ("model=tests.networks:dropout", "optim=adamw", "optim.lr=0.01", "channels_last=true")
    folder = tmp_path / "parts"
    whole = train(*words)
    part = train(*words, "max_steps=4", folder=folder)
    assert "the first 4 steps of 2 epochs of 3 steps" in part.log
    done = train(*words, "resume=auto", folder=folder)
    assert done.steps == [1, 2, 3, 4, 5, 6]
    assert done.losses == whole.losses and done.summary["amp"] == whole.summary["amp"]
    assert (done.summary["amp"]["scale"] is None) == (precision == "bf16")
    assert done.summary["precision"] == precision
    models = [run.checkpoint()["model"] for run in (done, whole)]
    weight = models[0]["3.weight"]
    assert weight.stride() == (72, 9, 3, 1), "on disk always contiguous"
    assert weight.dtype == torch.float32
    torch.testing.assert_close(*models, rtol=0, atol=0)


@pytest.mark.slow
def test_an_evaluation_leaves_the_run_alone(train):
    trained = train("ema_decay=0.5", "epochs=1")
    before = {path: path.read_bytes() for path in trained.folder.rglob("*") if path.is_file()}
    done = train("evaluate_only=true", f"resume={trained.folder}")
    newest = f"{trained.folder}/checkpoints/step-00000003.pt (epoch 0, step 3)"
    assert f"weights: {newest}\n" in done.log and "as a page: report=true\n" in done.log
    assert done.summary["val"] == trained.summary["val"] and done.summary["steps"] == 3
    assert not done.records("train")

    words = ["evaluate_only=true", "batch_size=5", "optim=adamw", "ema_decay=0.5"]
    for resume in ("auto", f"{trained.folder}/checkpoints/best.pt"):
        train(*words, f"resume={resume}", folder=trained.folder)
        evaluated = json.loads((trained.folder / "evaluation/summary.json").read_text())
        assert evaluated["val"] == pytest.approx(trained.summary["val"])
    assert {path: path.read_bytes() for path in before} == before

    for wrong, problem in (
        (["data=synthetic", "data.root=null", f"resume={trained.folder}"], "num_classes"),
        (["resume=auto"], "no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=problem):
            train(*words, *wrong)


@pytest.mark.slow
def test_a_run_that_cannot_continue_says_why(train, tmp_path, monkeypatch):
    scaler = torch.amp.GradScaler
    fp16 = "precision=fp16 data.image_size=16"
    for words, scale, problem in (
        ("model=tests.networks:nan_at_third_step", 1.0, "the loss is nan at step 3 on rank 0"),
        (f"{fp16} epochs=7", 1e19, "21 of 21 updates were skipped"),
        (fp16, 0.5, "the loss scale fell to 0.5 at step 1:"),
    ):
        monkeypatch.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=scale))
        folder = tmp_path / str(scale)
        with pytest.raises(TrainingFault, match=problem):
            train(*words.split(), folder=folder)
        summary = Run(folder, 1).summary
        assert summary["status"] == "failed" and re.search(problem, summary["why"])
        assert re.search(f"the run failed: {problem}", (folder / "train.log").read_text())
    monkeypatch.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=1e19))
    stopped = "model=tests.networks:terminated_in_evaluation batch_size=4"
    assert train(*f"{fp16} {stopped}".split(), folder=tmp_path / "stopped").exit_code == 143


@pytest.mark.parametrize(("on_nonfinite", "bad_step"), [("skip", 8), ("skip", 10), ("stop", 8)])
def test_a_checkpoint_in_a_window_with_nan_has_good_statistics_and_its_run_can_continue(
    on_nonfinite, bad_step, train, monkeypatch, tmp_path
):
    """NaN in a step of 12, before or after a save in step 9, log lines at 5 and 10."""
    monkeypatch.setattr(Plan, "lr_at", Plan.lr_at)  # brings it back at the end
    planted = partial(networks.nan_images_at_a_step, plan=Plan, at_step=bad_step)
    monkeypatch.setattr(networks, "planted", planted, raising=False)
    words = ("model=tests.networks:planted", "batch_size=16", "log_every=5", "optim.lr=0.05",
             "ema_decay=0.5", f"on_nonfinite={on_nonfinite}")  # fmt: skip
    folder, saving = tmp_path / "run", "checkpoint.every_steps=3"
    if on_nonfinite == "skip":
        uninterrupted, saved = train(*words), train(*words, saving, "checkpoint.keep=9")
        resumed = f"resume={saved.folder}/checkpoints/step-00000009.pt"
        ended = [uninterrupted.checkpoint(), train(*words, saving, resumed).checkpoint()]
        nine = saved.checkpoint("step-00000009.pt")
        for name in ("model", "average"):
            torch.testing.assert_close(ended[0][name], ended[1][name], rtol=0, atol=0)
        assert [state["progress"]["bad_steps"] for state in (nine, *ended)] == [0, 1, 1]
    else:
        with pytest.raises(TrainingFault, match="step 8 "):
            train(*words, saving, folder=folder)
        nine = Run(folder, 1).checkpoint()
        assert nine["progress"]["step"] == 6, "no checkpoint has the step that ends the run"
        monkeypatch.setattr(networks, "planted", partial(planted, at_step=99))  # none any more
        assert train(*words, "resume=auto", "optim.lr=0.01", folder=folder).exit_code == 0
    for name, value in [*nine["model"].items(), *nine["average"].items()]:
        assert value.isfinite().all(), name


def test_a_run_that_was_resumed_with_other_settings_says_so(train):
    run, split = train("max_steps=2"), ("batch_size=16", "accumulate_steps=2", "resume=auto")
    assert run.summary["resumed_with"] is None
    train(*split, "max_steps=4", folder=run.folder)
    assert " x batch " not in run.log
    scaled = "optim.reference_batch_size=512"
    run = train(*split, "optim.lr=0.1", scaled, "log_every=2", folder=run.folder)
    assert " lr 0.00625 = optim.lr 0.1 x batch 32 / 512; optim.reference_batch_size=0" in run.log
    assert run.summary["resumed_with"] == [
        "accumulate_steps: 1 -> 2",
        "batch_size: 32 -> 16",
        "optim.lr: 0.4 -> 0.1",
        "optim.reference_batch_size: 256 -> 512",
    ]


def test_the_first_cause_is_named_and_a_limit_counts_steps():
    nan, gradient, later = (7, 1, math.nan), (7, 0, 1.0), (8, 0, math.nan)
    for bad, earlier, limit, problem in (
        ([gradient, later, nan], 0, 0, r"the loss is nan at step 7 on rank 1.*optim\.lr"),
        ([gradient, later], 0, 0, "a gradient is not finite at step 7 on rank 0"),
        ([nan], 2, 2, "3 such steps are more than 2"),
    ):
        with pytest.raises(TrainingFault, match=problem):
            count_bad_steps(bad, earlier, limit)
    assert count_bad_steps([nan, gradient], 1, 2) == 2, "steps, not ranks"


def test_cublas_is_told_that_a_run_is_deterministic(tiny, monkeypatch):
    """Before any work: it reads its variable at its first product."""
    monkeypatch.setattr(os, "environ", {})
    with ExitStack() as stack:
        prepare_process(tiny("deterministic=true"), Dist(0, 1, torch.device("cpu")), stack)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()


def test_settings_and_models_that_cannot_train_are_refused(train, tiny):
    for words, problem in (
        (["batch_size=32", "accumulate_steps=4"], "one step takes 128 images"),
        (["model=tests.networks:too_few_outputs"], r"\[2, 2\].* 3 classes"),
        (["model=tests.networks:raising"], "planted, in two lines"),
        (["batch_size=24", "global_batch_size=32"], "not a multiple"),
    ):
        with pytest.raises(ConfigError, match=problem):
            train(*words)
    wrong = ("model=resnt18", "model=vgg99", "log_to=[tensorbord]", "augment.policy=rand-q5")
    with pytest.raises(ConfigError, match="did you mean tensorboard") as caught:
        check_runs([tiny(word) for word in ("model=resnet18", *wrong)])
    assert len(caught.value.problems) == 4, "every run of a sweep is checked"


def test_bad_images_are_counted_in_percent_and_named_once(train, tmp_path):
    images, folder = tmp_path / "images", tmp_path / "named"
    write_images(images, {"train": 32, "val": 7})
    for number in range(0, 32, 4):
        (images / f"train/red/{number:03d}.JPEG").write_bytes(b"\xff\xd8 no picture")
    (images / "val/red/000.JPEG").write_bytes(b"")
    words = ("data.on_bad_image=skip", "batch_size=8", "epochs=3", f"data.root={images}")
    at_most = (*words, "data.max_bad_images=7.7%")  # 9 of 117
    first = train(*at_most, "max_steps=13", folder=folder)
    assert f"Skipped images {first.records('train')[-1]['skipped_images']}" in first.log
    done = train(*at_most, "max_steps=14", "resume=auto", folder=folder)
    assert done.log.count("9 of 117 images are bad (7.7 %)") == 1
    counts = [record["skipped_images"] for record in done.records("train")]
    saved = first.checkpoint()["progress"]["skipped_images"]
    assert counts == sorted(counts) and counts[-1] >= saved >= 8, "counted over both processes"
    assert done.summary["skipped_images"] > counts[-2]
    assert f"9 bad images skipped {done.summary['skipped_images']} times. Records: " in done.log
    assert done.summary["val"]["images"] == 20
    with (folder / "bad_images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    reasons = {Path(row["file"]).name: row["reason"] for row in rows}
    assert len(rows) == 9 and reasons["000.JPEG"] == "the file is empty"
    with pytest.raises(BadImageError, match=r"8 images .* data.max_bad_images=6%"):
        train(*words, "data.max_bad_images=6%", folder=tmp_path / "ended")
    for path in (images / "val").rglob("*.JPEG"):
        path.write_bytes(b"\xff\xd8\xff broken")
    with pytest.raises(TrainingFault, match="none of the 21 validation images"):
        train(*words, "epochs=1", "max_steps=2")


# --- growing images -------------------------------------------------------------------------------

GROWING = ("data.size_schedule=[[0,16],[1,24],[2,32]]", "data.val_size=40", "epochs=3")


@pytest.mark.slow
def test_records_name_the_size_and_the_speed_is_that_of_the_last_one(train):
    words = (*GROWING, "warmup_steps=1", "batch_size=24")
    run, shorter = train(*words), train(*words, "channels_last=true", "max_steps=6")
    windows = [(w["image_size"], w["images"], w["warmup"]) for w in run.records("train")]
    assert windows == [(size, 24, step == 0) for size in (16, 24, 32) for step in range(4)]
    assert run.summary["image_size"] == 32
    read = read_run(run.folder)
    assert [window.step for window in read.windows] == [10, 11, 12]
    pair = compare_pair([read], [read_run(shorter.folder)])
    assert any("data.image_size differs: 32" in note for note in pair.notes)


@pytest.mark.slow
def test_every_size_is_compiled_once_with_static_shapes(train, monkeypatch):
    shapes = []

    def backend(graph, inputs):
        shapes.extend(value.shape for value in inputs if isinstance(value, torch.Tensor))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    train(*GROWING, "batch_size=16", "compile=true")
    images = [tuple(shape) for shape in shapes if shape[:2] == (16, 3)]
    assert images == [(16, 3, size, size) for size in (16, 24, 32)]


def test_names_cannot_command_the_terminal(capsys):
    with RunLog() as log:
        logging.getLogger("cl_train").info("bad image \x1b]0;title\x07\x9b2J.jpg\tof\ntwo lines")
    assert log and r"bad image \x1b]0;title\x07\x9b2J.jpg" + "\tof\ntwo" in capsys.readouterr().out
