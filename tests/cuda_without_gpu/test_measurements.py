"""cuDNN times its algorithms for a shape, which takes seconds: only for shapes that come again, and
only the ten that it expects to be the fastest. Times of an audit are those of the device. What
nvidia-smi says: records, and verdicts that are refused."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from cl_train.config.schema import Config
from cl_train.data.device import Batch, DeviceFormat
from cl_train.measure import audit, operator_times, paired
from cl_train.measure.timed_step import TimedStep, Workload
from cl_train.memory_format.convert import CHANNELS_LAST
from cl_train.step.precision import BY_NAME, kernel_selection
from cl_train.step.train_step import StepSettings
from cl_train.sweeps import verdict
from cl_train.system import machine
from cl_train.system.machine import gpu_state, problem_of_gpu
from cl_train.system.run_folder import read_run
from cl_train.training import build, loop
from cl_train.training.evaluation import outputs
from tests.cuda_without_gpu.fake_cuda import CUDA
from tests.models.test_facts import ComputesWithValues
from tests.networks import small

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
            cfg = Config(batch_size=4, compile=is_compiled)
            build.try_run(cfg, small(3), StepSettings(FP32), form, 3)
    assert tried == [(4, True, 10), (2, False, 10)]


def test_a_copy_is_timed_that_takes_longer_than_its_launch(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape, device="meta"))
    monkeypatch.setattr(audit, "step_times_s", lambda copy, count, device: [1.0] * count)
    read_and_written_bytes = 1000 / audit.copy_ms_per_byte(CUDA)
    assert read_and_written_bytes >= 2 * 256e6


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


# --- the state of the GPU -------------------------------------------------------------------------

USUAL = "1980, 1980, 45, 612.30, 0x0000000000000000"
SLOWED = "1005, 1980, 87, 500.00, 0x0000000000000040"


def state_of(state, pids="7"):
    def answer(command):
        assert command[:2] == ["nvidia-smi", "--id=GPU-0a"]
        return pids if "compute-apps" in command[2] else state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_output_of", answer)
        properties = SimpleNamespace(uuid="0a")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return gpu_state(CUDA)


@pytest.mark.parametrize(
    ("state", "pids", "problem"),
    [
        (USUAL, "7", None),
        ("1400, 1980, 60, 700.00, 0x4", "", None),  # its power limit is usual
        (SLOWED, "7", "slowed the GPU to 1005 MHz"),
        (USUAL, "7\n8\n9", "2 other processes"),
        ("[N/A], 1980, 45, 612.30, 0x0", "7", None),
        (None, None, None),
    ],
)
def test_heat_and_other_processes_are_problems(state, pids, problem):
    found = state_of(state, pids)
    assert (found is None) == (state is None or "N/A" in state)
    assert (problem or "None") in str(problem_of_gpu(found))
    assert gpu_state(torch.device("cpu")) is None


def test_a_shared_gpu_makes_a_comparison_untrusted(monkeypatch):
    shared = state_of(USUAL, "7\n8")
    monkeypatch.setattr(paired, "gpu_state", lambda device: shared)
    done = paired.compare_layouts(small(3), 4, image_size=16, target_ci=9.0, time_limit_s=0.0)
    assert done.verdict == "not_comparable" and "1 other processes used the GPU" in str(done)
    assert done.to_dict()["gpu"]["clock_mhz"] == 1980


def test_a_run_records_it_and_its_first_step(train, monkeypatch):
    slowed = state_of(SLOWED)
    monkeypatch.setattr(loop, "gpu_state", lambda device: slowed)
    run = train("log_to=[]", "epochs=1")
    assert run.summary["gpu"]["is_slowed"] and run.summary["reserved_memory_gib"] is None
    assert run.summary["first_step_s"] >= 0
    runs = [read_run(run.folder)]
    obstacles = list(verdict._obstacles({"a": runs, "b": runs}, "channels_last"))
    assert any("slowed the GPU" in obstacle for obstacle in obstacles)
