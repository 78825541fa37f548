"""cuDNN times its algorithms for a shape, which takes seconds: only for shapes that come again; and
what nvidia-smi says: records, and verdicts that are refused.
"""

import itertools
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from benchmarks import peers
from cl_train.data.device import Batch, DeviceFormat
from cl_train.errors import ConfigError, RecordingError
from cl_train.measure import operator_times, paired
from cl_train.measure.timed_step import TimedStep, Workload
from cl_train.memory_format.convert import CHANNELS_LAST
from cl_train.step.precision import BY_NAME, kernel_selection
from cl_train.step.train_step import StepSettings
from cl_train.sweeps import verdict
from cl_train.system import machine
from cl_train.system.machine import DeviceClock, GpuWatch, problem_of_gpu
from cl_train.system.run_folder import read_run
from cl_train.training import active_run, build, evaluation, throughput
from cl_train.training.evaluation import outputs
from cl_train.training.parts import ModelSettings
from tests.cuda_without_gpu.fake_cuda import CUDA
from tests.models.test_facts import ComputesWithValues
from tests.networks import small
from tests.processes import wait_until

FP32 = BY_NAME["fp32"]
CUDNN = torch.backends.cudnn


def test_not_for_the_last_validation_batch_and_the_images_that_tell_the_facts():
    searches = []  # the images of each call, and whether it searches
    model = ComputesWithValues(small(3))
    model.model.register_forward_pre_hook(
        lambda _, inputs: searches.append((len(inputs[0]), CUDNN.benchmark))
    )
    batches = [Batch(torch.zeros(n, 3, 16, 16), torch.zeros(n)) for n in (4, 4, 3)]
    workload = Workload(4, (3, 16, 16), StepSettings(FP32), torch.device("cpu"))
    with kernel_selection(autotune=True):
        list(outputs(model, batches, FP32))
        assert searches == [(4, True), (4, True), (3, False)]
        searches.clear()
        TimedStep(model, CHANNELS_LAST, workload).warm_up()
        assert [*dict.fromkeys(searches)] == [(4, False), (2, False), (4, True)]  # first on "meta"


def test_not_for_the_two_images_of_a_trial(monkeypatch):
    """A compiled model needs less memory than this eager step, and trains on another shape."""
    tried = []

    def note(model, settings, form, shape, num_classes):
        tried.append((shape[0], CUDNN.benchmark, CUDNN.benchmark_limit))

    monkeypatch.setattr(build, "try_model", note)
    monkeypatch.setattr(CUDNN, "benchmark_limit", 10, raising=False)  # torch's own
    form = DeviceFormat(CUDA, torch.float32, torch.channels_last)
    with kernel_selection(autotune=True):
        for is_compiled in (False, True):
            settings = StepSettings(FP32, compile=is_compiled)
            build.try_run(ModelSettings("small", batch_size=4), small(3), settings, form, 3)
    assert tried == [(4, True, 10), (2, False, 10)]


# --- the state of the GPU -------------------------------------------------------------------------

USUAL = "1980, 1980, 45, 612.30, 0x0000000000000000"
SLOWED = "1005, 1980, 87, 500.00, 0x0000000000000040"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """On PATH, with these answers; it notes when it runs."""
    properties = SimpleNamespace(uuid="0a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def answers(state, pids="7"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        script = tmp_path / "bin/nvidia-smi"
        script.write_text(
            f"#!/bin/sh\n[ $1 = --id=GPU-0a ] || exit 2\ndate +%s.%N >>{tmp_path}/times\n"
            f"case $2 in *gpu=*) echo '{state}' ;; *) printf '{pids}' ;; esac\n"
        )
        script.chmod(0o755)
        return tmp_path / "times"

    return answers


def state_of(device=CUDA):
    watch = GpuWatch(device)
    watch.look()
    return watch.worst()


@pytest.mark.parametrize(
    ("state", "pids", "problem"),
    [
        ("1400, 1980, 60, 700.00, 0x4", "", None),  # its power limit is usual
        (SLOWED, "7", "slowed the GPU to 1005 MHz"),
        (USUAL, r"7\n8\n9", "2 other processes"),
        ("[N/A], 1980, 45, 612.30, 0x0", "7", None),
        (None, None, None),
    ],
)
def test_heat_and_other_processes_are_problems(state, pids, problem, nvidia_smi):
    if state is not None:  # else there is no nvidia-smi
        nvidia_smi(state, pids)
    found = state_of()
    assert (found is None) == (state is None or "N/A" in state)
    assert (problem or "None") in str(problem_of_gpu(found))
    assert state_of(torch.device("cpu")) is None


def test_a_run_asks_between_its_first_and_its_last_step(train, nvidia_smi, monkeypatch):
    """As does a benchmark between its rounds."""
    times, steps = nvidia_smi(SLOWED), []
    monkeypatch.setattr(active_run, "GpuWatch", lambda device: GpuWatch(CUDA))
    tick = throughput.ThroughputMeter.tick

    def noted(meter, *arguments, **words):
        tick(meter, *arguments, **words)
        steps.append(time.time())
        if len(steps) == 8:  # it was started two steps before
            wait_until(lambda: times.exists() and len(times.read_text().split()) == 2)

    monkeypatch.setattr(throughput.ThroughputMeter, "tick", noted)
    run = train("log_to=[]", "epochs=1", "log_every=2", "batch_size=8", "warmup_steps=4")
    asked = [float(word) for word in times.read_text().split()]
    assert asked and steps[0] < min(asked) and run.summary["gpu"]["is_slowed"]
    assert max(asked) < steps[-1]
    runs = [read_run(run.folder)]
    obstacles = list(verdict._obstacles({"a": runs, "b": runs}, "channels_last"))
    assert any("slowed the GPU" in obstacle for obstacle in obstacles)


def test_a_shared_gpu_makes_a_comparison_untrusted(nvidia_smi, monkeypatch):
    nvidia_smi(USUAL, r"7\n8")
    monkeypatch.setattr(paired, "GpuWatch", lambda device: GpuWatch(CUDA))
    monkeypatch.setattr(paired, "BLOCK_S", 0.0)
    done = paired.compare_layouts(small(3), 4, image_size=16, target_ci=9.0, time_limit_s=0.0)
    assert done.verdict == "not_comparable" and "1 other processes used the GPU" in str(done)
    assert done.to_dict()["gpu"]["clock_mhz"] == 1980


def test_an_evaluation_is_at_most_two_batches_ahead_of_the_device(train, monkeypatch):
    """Each holds its images: 116 MB at 256 images of 224 px."""
    marks, waits = itertools.count(), []

    class Clock(DeviceClock):
        def mark(self):
            return next(marks)

        def wait(self, mark):
            waits.append(mark)

    run = train("log_to=[]", "max_steps=1")
    monkeypatch.setattr(evaluation, "DeviceClock", Clock)
    train(f"resume={run.folder}", "evaluate_only=true", "batch_size=4")
    assert waits == [0, 1, 2, 3], "of six batches"


def test_operators_are_timed_on_the_models_device(monkeypatch):
    current = []
    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(operator_times, "measurement_state", Mock(return_value=nullcontext()))
    monkeypatch.setattr(operator_times, "TimedStep", Mock(side_effect=KeyError("the first step")))
    workload = Workload(2, (3, 8, 8), StepSettings(FP32), second)
    with pytest.raises(KeyError, match="first step"):
        operator_times.time_operators(small(3), workload, time_limit_s=1.0)
    assert current == [second]


def test_the_worst_state_of_a_gpu_is_kept_and_it_is_asked_while_it_works(
    nvidia_smi, monkeypatch, tmp_path
):
    """An idle GPU is not slowed, whatever it was an hour before."""
    clock = Mock(side_effect=[0.0, 1.0, 2.0, 100.0, 200.0, 300.0, 400.0])
    monkeypatch.setattr(machine.time, "monotonic", clock)
    watch = GpuWatch(CUDA)
    watch._next_at = -1.0
    for state in (USUAL, None, SLOWED, USUAL):
        if state is not None:
            nvidia_smi(state)
        watch.look()
        watch._read()
    assert watch.worst()["clock_mhz"] == 1005
    assert len((tmp_path / "times").read_text().split()) == 2 * 3, "not within ten seconds"


def test_a_run_records_its_first_step_and_excludes_the_export_of_its_profile(train, monkeypatch):
    pauses = Mock()
    monkeypatch.setattr(throughput.ThroughputMeter, "exclude_pause", pauses)
    run = train("log_to=[]", "epochs=1", "max_steps=12", "profile=true", "batch_size=2")
    assert run.summary["gpu"] is None and run.summary["reserved_memory_gib"] is None
    assert run.summary["first_step_s"] >= 0
    assert pauses.call_count == 1, "seconds that are not training"


def test_operators_are_timed_in_the_state_of_training():
    """fp32 is not TF32, and cuDNN searches."""
    found = []
    model = small(3)
    model.register_forward_pre_hook(lambda *_: found.append((CUDNN.benchmark, CUDNN.allow_tf32)))
    workload = Workload(2, (3, 16, 16), StepSettings(FP32), torch.device("cpu"))
    operator_times.time_operators(model, workload, time_limit_s=0.0)
    assert found[-1] == (True, False)


def test_a_bare_loop_searches_as_the_trainer_does(monkeypatch):
    found = []
    monkeypatch.setattr(peers, "timed_s", lambda steps, device: found.append(CUDNN.benchmark) or 1)
    settings = peers.OverheadSettings("squeezenet1_1", batch_size=2, image_size=32, steps=2)
    peers.bare_steps(settings, torch.device("cpu"))
    assert found == [True]


@pytest.mark.parametrize(("can_go_on", "sizes"), [(True, [4, 2, 1]), (False, [4])])
def test_after_a_lost_recording_no_smaller_batch_is_tried(can_go_on, sizes, monkeypatch):
    """Before torch 2.15 its memory is not returned."""
    tried = []

    def failing(variants, workload, stop):
        tried.append(workload.batch_size)
        raise RecordingError("it cannot be recorded as a CUDA graph: CUDA error: out of memory")

    monkeypatch.setattr(paired, "_compared", failing)
    monkeypatch.setattr(paired, "CAN_GO_ON_AFTER_FAILURE", can_go_on)
    with pytest.raises(ConfigError if can_go_on else RecordingError):
        paired.compare_layouts(small(3), 4, image_size=16)
    assert tried == sizes
