"""Run work in a forked process, so that a crash of torch, or a lack of memory, is an error of that work only.

A kernel that crashes (SIGSEGV, SIGABRT, SIGFPE) would end the user's program, a notebook for instance. A fork has the
model already: nothing is imported, pickled or executed again but the result. Known crashes of channels_last are named.
"""

import faulthandler
import mmap
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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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
_PLACE_BYTES = 4096
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


def known_issues(model: nn.Module, *, device: torch.device | str) -> list[str]:
    """What is known to crash or to be wrong in channels_last on `device`, one line each. The model is not run."""
    if torch.device(device).type == "mps":
        return ["MPS had wrong or crashing channels_last backward passes (pytorch/pytorch#141009, #143196)"]
    if torch.device(device).type != "cpu":
        return []
    found = [name or "the model" for name, module in model.named_modules() if _crashes_onednn(module)]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return [f"{', '.join(found[:2])}{more}: {ONEDNN_CRASH}"] if found else []


def _crashes_onednn(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.in_channels >= 16:
        return False
    return max(module.kernel_size) == 1 and max(module.stride) > 1 and not any(module.padding)


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

    Raises:
        Crash: a signal ended the process. `work` is then run again to find the module.
        OutOfMemory: it was SIGKILL.
    """
    is_daemon = multiprocessing.current_process().daemon  # as the workers of a Pool: multiprocessing refuses to fork it
    if _is_child or is_daemon or sys.platform != "linux" or torch.cuda.is_available():
        return work()
    ended = _forked(work, None)
    if ended is None:
        return work()
    if isinstance(ended, bytes):
        result, error = pickle.loads(ended)
        if error is not None:
            raise error
        return result
    if ended == -signal.SIGKILL:
        raise OutOfMemory("the process was killed by SIGKILL, as the system does when it is out of memory")
    with mmap.mmap(-1, _PLACE_BYTES) as place:  # shared with the child
        again = _forked(work, place)
        where, separator, known = bytes(place).rstrip(b"\0").decode().partition("; ")
    if not isinstance(again, int):  # it has not crashed again
        where = ""
    what = f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"ended with exit code {ended}"
    raise Crash(f"the process was {what}{where}{separator}{known}")


def _forked(work: Callable[[], Any], place: mmap.mmap | None) -> bytes | int | None:
    """The pickled outcome of `work`, a result and an exception, or the exit code of its process.

    None if `work` needs this process: it cannot go on in a fork, or its result cannot be pickled.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    errors = os.memfd_create("stderr")
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    process = context.Process(target=_run_child, args=(work, sender, errors, place, modes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a threaded process, from Python 3.12 on
        process.start()
    sender.close()
    try:
        data = _receive(receiver, process)
        if data is None:
            return None
        process.join()
        if not data:
            return process.exitcode
        lines = os.pread(errors, 2**20, 0).decode("utf-8", "replace").splitlines(keepends=True)
        sys.stderr.write("".join(line for line in lines if _PROFILER not in line))
        return data
    finally:
        process.kill()  # also after Ctrl-C
        process.join()
        process.close()
        receiver.close()
        os.close(errors)


def _receive(receiver: Connection, process: BaseProcess) -> bytes | None:
    """The pickled outcome; empty if the process ended without one, None if it cannot go on or has asked for that."""
    used = -1
    while not receiver.poll(_STALLED_S):
        if not process.is_alive():  # a process that it started holds the pipe
            return b""
        fields = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        before, used = used, sum(map(int, fields[11:15]))
        if used == before:
            return None
    try:
        return receiver.recv_bytes() or None
    except EOFError:
        return b""


def _run_child(
    work: Callable[[], Any], sender: Connection, errors: int, place: mmap.mmap | None, modes: tuple[bool, bool]
) -> None:
    """Send the outcome of `work` and end the process."""
    global _is_child
    _is_child = True
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process ends, not the user's
    os.dup2(errors, 2)  # without the C library's words on a crash; the parent prints the rest

    def send_outcome() -> None:
        if place is not None:
            _note_modules(place)
        outcome: tuple[Any, BaseException | None]
        try:
            torch.zeros((), requires_grad=True).backward()
        except RuntimeError:  # see above
            return sender.send_bytes(b"")
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):  # inference_mode sets both
            try:
                outcome = work(), None
            except BaseException as error:
                outcome = None, error
        try:
            data = pickle.dumps(outcome)
            pickle.loads(data)  # an exception can be one that is not constructed from its arguments
        except Exception:
            data = b""
        sender.send_bytes(data)

    # A new thread, because OpenMP's threads of the forking one are gone: it would wait for them forever.
    thread = threading.Thread(target=send_outcome)
    thread.start()
    thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _note_modules(place: mmap.mmap) -> None:
    """Keep in `place` which module of a model is running, forward or backward, and a layer that is known to crash."""
    names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
    crashing = ""

    def note(direction: str, module: nn.Module) -> None:
        nonlocal crashing
        kind = type(module).__name__ if any(module.children()) else str(module).splitlines()[0]
        what = f"{names.get(module, 'a module')} ({kind})"
        if direction == "backward" and _crashes_onednn(module):
            crashing = what
        text = f" in the {direction} pass of {what}" if what != crashing else ""
        text += f"; {crashing}: {ONEDNN_CRASH}" if crashing else ""
        place[:] = text.encode("ascii", "replace")[:_PLACE_BYTES].ljust(_PLACE_BYTES, b"\0")

    def before(module: nn.Module, args: Any) -> None:
        if module not in names:
            names.update({child: name or "the model" for name, child in module.named_modules()})
        note("forward", module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: note("backward", module))

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)
