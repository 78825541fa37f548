"""What is due when; windows and averages, with a clock that only moves when told; records after a
resume.
"""

import json
import shutil
from dataclasses import asdict, fields, replace

import pytest
import torch

from cl_train.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimConfig,
    ScheduleConfig,
)
from cl_train.system.machine import DeviceClock
from cl_train.system.run_folder import (
    ProcessFacts,
    Results,
    RunFacts,
    Speed,
    Window,
    read_run,
    spread,
)
from cl_train.training.parts import plan_of
from cl_train.training.plan import Progress
from cl_train.training.records import Records
from cl_train.training.throughput import ThroughputMeter
from cl_train.training.trackers import Trackers


def test_the_learning_rate_follows_the_global_batch_and_images_that_grow_change_no_step():
    data, schedule = DataConfig(size_schedule=[[0, 64], [2, 128]]), ScheduleConfig(name="linear")
    cfg = Config(batch_size=8, accumulate_steps=3, epochs=4, max_steps=30)
    cfg = replace(cfg, data=data, schedule=schedule)
    for reference_batch_size, peak in ((256, 48 / 256), (0, 1.0)):
        optim = OptimConfig(reference_batch_size=reference_batch_size, lr=1.0)
        plan = plan_of(replace(cfg, optim=optim), 500, 2)
        assert plan.image_sizes == (64, 96, 128, 128) and plan.global_batch_size == 48
        assert plan.steps_per_epoch == 10 and plan.last_step == 30
        rates = [plan.lr_at(Progress(epoch=epoch, step_in_epoch=5)) for epoch in range(4)]
        assert rates == pytest.approx([peak * (1 - (epoch + 0.5) / 4) for epoch in range(4)])


def test_evaluations_and_checkpoints_come_at_their_epochs_and_at_the_end():
    for epochs, max_steps, every, evaluations in (
        (5, None, 2, [8, 16, 20]), (1, 2, 0, [2]), (1, 2, 1, [2]), (1, 2, -1, []),
    ):  # fmt: skip
        cfg = Config(batch_size=10, epochs=epochs, max_steps=max_steps, evaluate_every=every)
        plan = plan_of(replace(cfg, checkpoint=CheckpointConfig(every_epochs=3)), 40, 1)
        progress, evaluated, saved = Progress(), [], []
        while not plan.is_done(progress):
            progress.advance(plan.global_batch_size)
            if plan.is_epoch_end(progress):
                evaluated += [progress.step] * plan.is_evaluation_due(progress)
                saved += [progress.step] * plan.is_save_due(progress)
                assert not plan.is_done(progress)
                plan.close_epoch(progress)
        assert evaluated == evaluations and saved == ([12, 20] if plan.last_step == 20 else [2])
        assert progress.images_seen == 10 * plan.last_step


class Clock(DeviceClock):
    """The time of host and device."""

    now = 100.0

    def mark(self):
        return self.now


def steps(meter, clock, count, seconds, wait_s=0.0):
    for _ in range(count):
        with meter.waiting():
            clock.now += wait_s
        clock.now += seconds - wait_s
        meter.tick(32)


def test_windows_count_images_waits_and_no_pauses_also_if_they_are_read_late():
    clock = Clock(torch.device("cpu"))
    meter = ThroughputMeter(0, clock, clock.mark)
    clock.now += 1000  # an evaluation
    meter.start(0)
    closed = []
    for wait_s in (0.1, 0.4):
        steps(meter, clock, 2, 0.5, wait_s)
        clock.now += 60  # a checkpoint is saved
        meter.exclude_pause()
        steps(meter, clock, 2, 0.5, wait_s)
        closed.append(meter.close())
    for window, wait_pct in zip(closed, (20, 80), strict=True):
        expected = {"images": 128, "seconds": 2.0, "images_per_s": 64, "step_ms": 500}
        expected |= {"data_wait_pct": wait_pct, "image_size": 0, "warmup": False}
        expected["host_bound_pct"] = 0
        assert meter.measured(window) == pytest.approx(expected)


def test_the_first_steps_of_an_image_size_are_warmup_which_counts_only_if_alone():
    clock, windows = Clock(torch.device("cpu")), []
    meter = ThroughputMeter(2, clock, clock.mark)
    for size, seconds in ((64, 9.0), (64, 1.0), (96, 1.0)):
        meter.start(size)
        for _ in range(2):
            steps(meter, clock, 1, seconds)
            windows.append(Window(step=1, time=1.0, **meter.measured(meter.close())))
    sizes = [(window.image_size, window.warmup) for window in windows]
    assert sizes == [(64, True), (64, True), (64, False), (64, False), (96, True), (96, True)]
    whole = {"median": 32, "p5": 32, "p95": 32, "windows": 2}
    assert Speed.of(windows[:4], 64).images_per_s["end_to_end"] == whole
    assert Speed.of(windows[:1], 64).images_per_s["end_to_end"]["windows"] == 1
    known = {"median": 50, "p5": 5, "p95": 95, "windows": 101}
    assert spread(range(101)) == known


def window(step, loss):
    return Window(step=step, time=1.0, images_per_s=2.0, data_wait_pct=0.0, seconds=1, loss=loss)


def records(folder, step=0):
    known = {item.name: None for item in fields(RunFacts)}
    known |= {"started": "2026-01-01T00:00:00+00:00", "device": "cpu"}
    progress = Progress(step=step, closed_step=step)
    return Records(folder, asdict(Config()), Trackers([]), RunFacts(**known), progress)


def test_no_key_of_the_summary_comes_from_two_of_its_parts():
    parts = (RunFacts, Speed, Results, ProcessFacts)
    keys = ["schema_version", "status", "why"]
    keys += [item.name for part in parts for item in fields(part)]
    assert sorted(keys) == sorted({*keys})


def recorded(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_resume_drops_what_a_killed_process_left_a_new_run_all_and_other_ranks_write_nothing(
    tmp_path,
):
    other = records(None)
    other.write_evaluation("val", {"loss": 1.0})
    assert other.finish("completed")["val"] == {"loss": 1.0} and list(tmp_path.iterdir()) == []
    first = records(tmp_path)
    for step in (10, 20, 30):
        first.append(window(step, loss=float("nan")).to_record())
    first.write_evaluation("val", {"loss": float("inf"), "more": [float("inf"), 1.5]})
    with open(tmp_path / "metrics.jsonl", "a") as file:  # damaged; killed in mid-write
        file.write('{"kind": "train", "step": null}\n{"kind": "train", "st')
    records(tmp_path, step=20).append(window(30, loss=2.0).to_record())
    assert recorded(tmp_path) == [10, 20, 30]
    before = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert before["loss"] is None, "JSON has no NaN or Infinity"
    failed = records(tmp_path, step=30).finish("failed", why="before its first step")
    assert failed["train"]["loss"] is None, "results of the earlier process are not its own"
    records(tmp_path).append(window(1, loss=1.0).to_record())
    assert recorded(tmp_path) == [1]


def test_the_load_of_a_resumed_run_is_that_of_all_its_processes(tmp_path):
    records(tmp_path).append(window(10, loss=1.0).to_record())
    killed = records(tmp_path, step=10)  # an earlier process left no summary
    assert killed.finish("interrupted", others_pct=1.0)["others_pct"] is None
    first = records(tmp_path)
    first.append(window(10, loss=1.0).to_record())
    first._progress.step = 10
    first.finish("interrupted", others_pct=60.0, lost_pct=(7.0, 0.0))
    second = records(tmp_path, step=10)
    summary = second.finish("completed", others_pct=2.0, lost_pct=(8.0, 0.0))
    assert (summary["others_pct"], summary["lost_pct"]) == (60.0, 8.0)


def test_what_workers_lost_counts_as_far_as_the_step_waited_for_its_batch(tmp_path):
    for waited_pct, lost_pct in ((3.0, 4.0), (90.0, 31.0)):
        run = records(tmp_path)
        run.append(replace(window(10, loss=1.0), data_wait_pct=waited_pct).to_record())
        assert run.finish("completed", lost_pct=(1.0, 30.0))["lost_pct"] == lost_pct


SCORES = []


def planted_score(logits, targets):
    return {"score": SCORES.pop(0)}


def test_the_best_checkpoint_is_that_of_the_way_that_the_run_goes_on(train, tmp_path):
    """The first way is the best in its third epoch, the others leave it after the second. The first
    score is that of noise, before the run.
    """
    words = ("metrics=tests.training.test_progress:planted_score", "best_by=score", "epochs=4")
    SCORES[:] = [0, 5, 3, 9, 7]
    first = train(*words, "checkpoint.keep=4")
    assert first.saved_step("best.pt") == 9
    for scores, best_step, best_score in (([4, 2], 3, 5), ([4, 6], 12, 6)):
        folder = tmp_path / str(best_step)
        shutil.copytree(first.folder, folder)
        SCORES[:] = [0, *scores]
        again = train(*words, f"resume={folder}/checkpoints/step-00000006.pt", folder=folder)
        assert again.saved_step("best.pt") == best_step
        assert read_run(folder).summary["best.score"] == best_score
