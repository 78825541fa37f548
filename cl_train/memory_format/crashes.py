"""Run work in a forked process, so that a crash of torch, or a lack of memory, is an error of that work only.

A kernel that crashes (SIGSEGV, SIGABRT, SIGFPE) would end the user's program, a notebook for instance. A fork has the
model already: nothing is imported, pickled or executed again but the result. Known crashes of channels_last are named.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cl_train.config.schema import ConfigError
from cl_train.memory_format.model_call import tensors_in
from cl_train.system.processes import end_with_parent

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Tried: torch 2.15, images of 8 to 320 px. AVX-512: 1 to 15 channels, fp32 and bf16, above 64 px; AVX2: 1 to 7, fp32.
ONEDNN_CRASH = (
    "PyTorch's oneDNN crashes in the weight gradient of a 1x1 convolution with stride >= 2 and fewer than 16 input "
    "channels, in channels_last on a CPU (found with torch 2.15)"
)
_STALLED_S = 10.0  # without any CPU time: the work waits for a thread that the fork does not have
_NEEDS_PARENT = pickle.dumps(None)  # instead of a result and an exception
_PROFILER = "External init callback must run in same thread"  # of torch's profiler, in any thread but the first
_is_child = False
if not torch.cuda.is_available():
    # The first backward pass starts autograd's threads. Without devices there are none, and a fork can differentiate;
    # after torch.compile, which pretends that there is one, it could not.
    torch.zeros((), requires_grad=True).backward()


class Crash(ConfigError):
    """The work ended its process; the message says by which signal, and in which module."""


class OutOfMemory(Crash, MemoryError):
    """The system ended the process."""


def known_issues(model: nn.Module) -> str:
    """What is known to crash in channels_last on a CPU; empty for most models. The model is not run."""
    convolutions = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    small = [(name or "the model", conv) for name, conv in convolutions if conv.groups == 1 and conv.in_channels < 16]
    found = [name for name, conv in small if max(conv.kernel_size) == 1 < max(conv.stride) and not any(conv.padding)]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return f"{', '.join(found[:2])}{more}: {ONEDNN_CRASH}" if found else ""


def crash_safe(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function whose calls run as by `in_child`."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return in_child(lambda: function(*args, **kwargs))

    return call


def in_child(work: Callable[[], Result]) -> Result:
    """`work()` in a forked process, which costs milliseconds; returns its result, or raises its exception.

    What else it changes is lost, and its result must be picklable. In this process where a fork is not possible: on
    other systems than Linux, in a daemonic process, and if there is a GPU, whose state a fork would share.

    Raises Crash: it ended without a result, and again when `work` was repeated to find the module; OutOfMemory: by
    SIGKILL.
    """
    is_daemon = multiprocessing.current_process().daemon  # as the workers of a Pool: multiprocessing refuses to fork it
    if _is_child or is_daemon or sys.platform != "linux" or torch.cuda.is_available():
        return work()
    for is_noting in (False, True):  # again, because a fork of a threaded process can also crash by itself
        code, outcome = _forked(work, is_noting=is_noting)
        if outcome == _NEEDS_PARENT and not is_noting:
            return work()
        if outcome not in (b"", _NEEDS_PARENT) and not code:
            result, error = pickle.loads(outcome)
            if error is not None:
                raise error
            return result
        if code == -signal.SIGKILL:
            raise OutOfMemory("the process was killed by SIGKILL, as the system does when it is out of memory")
    what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise Crash(f"the process was {what}{outcome.decode('utf-8', 'replace') if code else ''}")


def _forked(work: Callable[[], Any], *, is_noting: bool) -> tuple[int, bytes]:
    """The exit code of a process that runs `work`, and the pickled result and exception, or _NEEDS_PARENT; after a
    crash, with `is_noting`, the module that ran last instead.
    """
    outcome, errors = os.memfd_create("outcome"), os.memfd_create("stderr")
    arguments = (work, outcome, errors, is_noting, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    process = multiprocessing.get_context("fork").Process(target=_run_child, args=arguments)
    collects = gc.isenabled()
    gc.disable()  # until the child has frozen what it inherits
    try:
        # of a threaded process, from Python 3.12 on
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            process.start()
    finally:
        if collects:
            gc.enable()
    waiter = threading.Thread(target=process.join)  # join(timeout) waits for processes that this one has left, too
    waiter.start()
    try:
        used = -1
        while waiter.is_alive():
            waiter.join(_STALLED_S)
            if waiter.is_alive():
                stat = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                before, used = used, sum(map(int, stat[11:15]))
                if used == before:
                    return 0, _NEEDS_PARENT
        code, written = process.exitcode or 0, Path(f"/proc/self/fd/{outcome}").read_bytes()
        if not code and written != _NEEDS_PARENT:
            lines = Path(f"/proc/self/fd/{errors}").read_text("utf-8", "replace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if _PROFILER not in line))
        return code, written
    finally:
        process.kill()  # also after Ctrl-C
        waiter.join()
        os.close(outcome)
        os.close(errors)


def _run_child(
    work: Callable[[], Any], outcome: int, errors: int, is_noting: bool, is_grad_enabled: bool, is_inference: bool
) -> None:
    """Write the outcome of `work` and end the process."""
    global _is_child
    _is_child = True
    # A garbage TCPStore or process group must not be collected here: its destructor joins threads of the parent only.
    gc.freeze()
    gc.enable()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process ends, not the user's
    os.dup2(errors, 2)  # without the C library's words on a crash; the parent prints the rest
    pickled = _NEEDS_PARENT

    def run() -> None:
        nonlocal pickled
        result = raised = None
        if is_noting:
            _note_modules(outcome)
        try:
            torch.zeros((), requires_grad=True).backward()
        except RuntimeError:  # see above
            return
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad_enabled):  # the first sets both
            try:
                result = work()
            except BaseException as error:
                raised = error
        with suppress(Exception):
            data = pickle.dumps((result, raised))
            pickle.loads(data)  # an exception can be one that is not constructed from its arguments
            pickled = data

    # A new thread, because OpenMP's threads of the forking one are gone: it would wait for them forever.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    Path(f"/proc/self/fd/{outcome}").write_bytes(pickled)  # os.write stops at 2 GiB
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _note_modules(file: int) -> None:
    """Keep in `file` which module of a model is running, forward or backward, and the model's known issues."""
    names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
    known = ""

    def note(direction: str, module: nn.Module) -> None:
        kind = type(module).__name__ if any(module.children()) else str(module).splitlines()[0]
        text = f" in the {direction} pass of {names.get(module, 'a module')} ({kind}){known}"
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode("utf-8", "replace"), 0)

    def before(module: nn.Module, args: Any) -> None:
        nonlocal known
        if module not in names:
            names.update({child: name or "the model" for name, child in module.named_modules()})
            known = f"; {known_issues(module)}".removesuffix("; ")
        note("forward", module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: note("backward", module))

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)
