"""Run work in a forked process, so that a crash of torch, or a lack of memory, is an error of that work only.

A kernel that crashes (SIGSEGV, SIGABRT, SIGFPE) would end the user's program, a notebook for instance. A fork has the
model already: nothing is imported, pickled or executed again but the result.
"""

import faulthandler
import mmap
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
from multiprocessing.connection import Connection, Pipe
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from cl_train.config.schema import ConfigError
from cl_train.memory_format.known_issues import known_crash
from cl_train.system.processes import end_with_parent

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

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


def crash_safe(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function whose calls run as by `in_child`."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return in_child(lambda: function(*args, **kwargs))

    return call


def in_child(work: Callable[[], Result]) -> Result:
    """`work()` in a forked process, which costs milliseconds; returns its result, or raises its exception.

    What else it changes is lost, and its result must be picklable. In this process where a fork is not possible: on
    other systems than Linux, and if there is a GPU, whose state a fork would share.

    Raises:
        Crash: a signal ended the process. `work` is then run again to find the module.
        OutOfMemory: it was SIGKILL.
    """
    if _is_child or sys.platform != "linux" or torch.cuda.is_available():
        return work()
    outcome, exit_code = _forked(work, None)
    if outcome is None and exit_code is None:
        return work()
    if outcome is not None:
        result, error = outcome
        if error is not None:
            raise error
        return result
    assert exit_code is not None
    if exit_code == -signal.SIGKILL:
        raise OutOfMemory("the process was killed by SIGKILL, as the system does when it is out of memory")
    what = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    raise Crash(f"the process was {what}{_place_of_crash(work)}")


def _place_of_crash(work: Callable[[], Any]) -> str:
    """The module that ran when `work` crashed again, if it did, and the layer that is known to crash."""
    with mmap.mmap(-1, 2 * _PLACE_BYTES) as places:  # shared with the child
        outcome, exit_code = _forked(work, places)
        where, known = (bytes(part).rstrip(b"\0").decode() for part in (places[:_PLACE_BYTES], places[_PLACE_BYTES:]))
    what, _, reason = known.partition(": ")
    if not where or outcome is not None or exit_code is None:  # it has not crashed again
        return f"; {known}" if known else ""
    return f" in {where}" + (f": {reason}" if known and where.endswith(what) else f"; {known}" if known else "")


def _forked(work: Callable[[], Any], place: mmap.mmap | None) -> tuple[tuple[Any, Any] | None, int | None]:
    """The outcome of `work`, a result or an exception, or the exit code of its process.

    Neither if `work` needs this process: it cannot go on in a fork, or its result cannot be pickled.
    """
    receiver, sender = Pipe(duplex=False)
    errors = os.memfd_create("stderr")
    parent_pid, modes = os.getpid(), (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a threaded process, from Python 3.12 on
        pid = os.fork()
    if pid == 0:
        _run_child(work, sender, errors, place, parent_pid, modes)
    sender.close()
    try:
        data = _receive(receiver, pid)
        if data is None:
            os.kill(pid, signal.SIGKILL)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pid = 0
        if not data:
            return None, (exit_code if data is not None else None)
        lines = os.pread(errors, 2**20, 0).decode("utf-8", "replace").splitlines(keepends=True)
        sys.stderr.write("".join(line for line in lines if _PROFILER not in line))
        return pickle.loads(data), 0
    finally:
        if pid:  # a signal, such as Ctrl-C
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        receiver.close()
        os.close(errors)


def _receive(receiver: Connection, pid: int) -> bytes | None:
    """The pickled outcome; empty if the process ended without one, None if it cannot go on or has asked for that."""
    used = -1
    while not receiver.poll(_STALLED_S):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[0] == "Z":  # it has ended, and a process that it started holds the pipe
            return b""
        before, used = used, sum(map(int, fields[11:15]))
        if used == before:
            return None
    try:
        return receiver.recv_bytes() or None
    except EOFError:
        return b""


# --- the child --------------------------------------------------------------------------------------------------------


def _run_child(
    work: Callable[[], Any],
    sender: Connection,
    errors: int,
    place: mmap.mmap | None,
    parent_pid: int,
    modes: tuple[bool, bool],
) -> None:
    """Send the outcome of `work` and end the process."""
    global _is_child
    _is_child = True
    try:
        end_with_parent(parent_pid=parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # if memory runs out, this process ends, not the user's
        os.dup2(errors, 2)  # without the C library's words on a crash; the parent prints the rest
        # A new thread, because OpenMP's threads of the forking one are gone: it would wait for them forever.
        thread = threading.Thread(target=_work_and_send, args=(work, sender, place, modes))
        thread.start()
        thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _work_and_send(
    work: Callable[[], Any], sender: Connection, place: mmap.mmap | None, modes: tuple[bool, bool]
) -> None:
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


def _note_modules(places: mmap.mmap) -> None:
    """Keep in `places` which module of a model is running, forward or backward, and a layer that is known to crash."""
    names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def note(direction: str, module: nn.Module) -> None:
        kind = type(module).__name__ if any(module.children()) else str(module).splitlines()[0]
        what = f"{names.get(module, 'a module')} ({kind})"
        places[:_PLACE_BYTES] = _padded(f"the {direction} pass of {what}")
        if (reason := known_crash(module)) and direction == "backward":
            places[_PLACE_BYTES:] = _padded(f"{what}: {reason}")

    def before(module: nn.Module, args: Any) -> None:
        if module not in names:
            names.update({child: name or "the model" for name, child in module.named_modules()})
        note("forward", module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: note("backward", module))

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)


def _padded(text: str) -> bytes:
    return text.encode("ascii", "replace")[:_PLACE_BYTES].ljust(_PLACE_BYTES, b"\0")
