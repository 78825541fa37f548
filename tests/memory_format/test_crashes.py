"""A crash of torch, or a lack of memory, in what the program tries for the user is an error of that work only."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import cl_train
from cl_train.config.schema import ConfigError
from cl_train.memory_format import crashes
from cl_train.memory_format.crashes import Crash, OutOfMemory, in_child, known_issues
from tests.faults.forkserver import Forked, train_script
from tests.networks import aborts_in_channels_last, small
from tests.processes import LIMIT_S, Process, wait_until
from tests.ranks import ROOT

CALLS: list[int] = []


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (partial(signal.raise_signal, signal.SIGSEGV), Crash, "SIGSEGV"),
        (partial(signal.raise_signal, signal.SIGFPE), Crash, "SIGFPE"),
        (os.abort, Crash, "SIGABRT"),
        (partial(signal.raise_signal, signal.SIGKILL), OutOfMemory, "memory"),
        (lambda: os._exit(3), Crash, "exit code 3"),
        (lambda: 1 / 0, ZeroDivisionError, "division"),
        (lambda: sys.exit(4), SystemExit, "4"),
        (lambda: warnings.warn("odd", stacklevel=1), UserWarning, "odd"),
    ],
)
def test_how_work_can_end(work: Callable[[], Any], error: type[BaseException], message: str) -> None:
    with pytest.raises(error, match=message):
        in_child(work)


def test_the_childs_garbage_collector_leaves_inherited_objects_alone() -> None:
    cycle: list[Any] = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert in_child(gc.collect) >= 0
    finally:
        gc.enable()


def test_a_crash_that_does_not_repeat_is_not_the_models(tmp_path: Path) -> None:
    def work() -> int:
        if not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            os.abort()
        return 5

    assert in_child(work) == 5


def test_results_come_back_and_nothing_else_changes(capfd: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # what earlier tests have left open
    parameter, descriptors = nn.Parameter(torch.zeros(2)), len(os.listdir("/proc/self/fd"))
    model, images = small(3).eval(), torch.randn(8, 3, 64, 64)
    expected = model(images).detach()  # OpenMP is used here first

    def work() -> tuple[torch.Tensor, torch.Tensor, bool]:
        CALLS.append(1)
        os.write(2, b"a word from C\n")
        with torch.enable_grad():
            parameter.add(1).sum().backward()
        assert parameter.grad is not None
        return model(images), parameter.grad, torch.is_grad_enabled()

    with torch.no_grad():
        output, gradient, is_grad_enabled = in_child(work)
    assert torch.allclose(output, expected, atol=1e-6)
    assert gradient.tolist() == [1.0, 1.0] and not is_grad_enabled
    assert parameter.grad is None and CALLS == []
    assert "a word from C" in capfd.readouterr().err
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_process_that_the_work_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes, "_STALLED_S", 60.0)
    started_at = time.monotonic()
    left = in_child(lambda: os.fork() or time.sleep(60))
    assert time.monotonic() - started_at < 60
    os.kill(left, signal.SIGKILL)


def test_what_a_fork_cannot_do_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes, "_STALLED_S", 0.3)
    assert in_child(lambda: lambda: 7)() == 7
    ready = threading.Event()
    threading.Timer(1.0, ready.set).start()  # this thread does not exist in a fork
    assert in_child(lambda: ready.wait(LIMIT_S))
    # multiprocessing refuses children to daemonic processes, as the workers of a Pool
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert in_child(os.getpid) == os.getpid()


@pytest.mark.slow
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Also a script without a `__main__` guard, which is not executed again."""
    script = f"""
import os, pathlib
from cl_train.memory_format.crashes import in_child
print("executed", flush=True)
in_child(lambda: (pathlib.Path("{tmp_path}/pid").write_text(str(os.getpid())), sum(iter(int, 1))))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    child = Process(int((tmp_path / "pid").read_text()))
    process.kill()
    assert process.communicate()[0] == "executed\n"
    wait_until(lambda: not child.is_running())


# --- where it is used -------------------------------------------------------------------------------------------------

IMAGES = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)


@pytest.mark.slow
def test_python_functions_survive_a_model_that_aborts_in_channels_last() -> None:
    model = aborts_in_channels_last(5)
    where = r"SIGABRT in the forward pass of 1 \(Fault"
    with pytest.raises(ConfigError, match=where):
        cl_train.audit(model.to(memory_format=torch.channels_last), IMAGES)
    with pytest.raises(ConfigError, match=where):
        cl_train.compare_layouts(model, 2, image_size=32, time_limit_s=1)
    choice = cl_train.choose_memory_format(model, batch_size=2, image_size=32, time_limit_s=1)
    assert not choice.channels_last and "SIGABRT" in choice.reason
    report = cl_train.check_parity(model, image_size=32)
    assert report.passed is False and "SIGABRT" in str(report)


@pytest.mark.parametrize("name", ["audit", "check_parity", "choose_memory_format", "compare_layouts"])
def test_what_is_no_model_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="a str is no model"):
        getattr(cl_train, name)("resnet18", *([IMAGES] if name == "audit" else []))


WORDS = (
    *("data=synthetic", "data.synthetic_images=16", "data.image_size=32", "batch_size=8", "epochs=1"),
    *("device=cpu", "model=tests.networks:aborts_in_channels_last"),
)
RUNS: list[tuple[list[str], int, str]] = [
    (["channels_last=true"], 2, "SIGABRT in the forward pass of 1 "),
    (["channels_last=auto"], 0, "contiguous: the layouts cannot be measured"),
    (["channels_last=auto", "batch_size=auto"], 0, "batch_size=auto: "),
    (["channels_last=false"], 0, "completed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "message"), RUNS)
def test_training_survives_a_model_that_aborts_in_channels_last(
    words: list[str], code: int, message: str, tmp_path: Path
) -> None:
    words, environment = [*WORDS, *words, f"hydra.run.dir={tmp_path}"], {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    done = Forked(partial(train_script, words), tmp_path / "log", environment)
    assert done.wait() == code, done.output()
    assert message in done.output() and "Traceback" not in done.output()
    summary = tmp_path / "summary.json"
    assert (summary.is_file() and json.loads(summary.read_text())["status"] == "completed") == (code == 0)


# --- known crashes ----------------------------------------------------------------------------------------------------


def test_the_known_crash_of_onednn() -> None:
    known = (nn.Conv2d(3, 48, 1, stride=2), nn.Conv2d(15, 4, 1, stride=(1, 2), bias=False))
    healthy = (nn.Conv2d(16, 4, 1, stride=2), nn.Conv2d(3, 48, 1), nn.Conv2d(3, 48, 3, stride=2), nn.Linear(3, 4))
    assert known_issues(nn.Sequential(*healthy, nn.Conv2d(4, 48, 1, stride=2, groups=2))) == ""
    for layer in known:
        assert known_issues(nn.Sequential(layer)).startswith("0: ")


@pytest.mark.slow
def test_the_weight_gradient_that_crashes_onednn_does_not_end_this_process() -> None:
    """It writes beyond its memory: the child crashes, or computes anything; on other CPUs it may be right."""
    model = nn.Sequential(nn.Conv2d(3, 48, 1, stride=2, bias=False), nn.BatchNorm2d(48))
    for _ in range(3):
        text = str(cl_train.check_parity(model, image_size=96))
        if "SIG" in text:
            assert "; 0: PyTorch's oneDNN crashes" in text
    assert cl_train.check_parity(model, image_size=96, mode="infer").passed
