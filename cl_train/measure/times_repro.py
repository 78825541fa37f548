"""A program of torch alone that times one call in both layouts."""

import torch

from cl_train.measure.times_report import Row
from cl_train.system.tensors import map_tensors

_PROGRAM = '''"""{row.name}

In a step of {model}: {row.contiguous_ms:.3g} ms contiguous,
{row.channels_last_ms:.3g} ms channels_last.
"""
import ctypes, platform, time, torch
from math import inf, nan
from torch import device

def tensor(shape, strides, dtype):
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides))
    values = torch.rand(size) if shape and dtype.is_floating_point else torch.zeros(size)
    return values.to("{device}", dtype).as_strided(shape, strides)

torch.set_num_threads({threads})
torch.backends.cudnn.benchmark = True  # as in training
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = {tf32}
if platform.libc_ver()[0] == "glibc":  # keep freed memory, or page faults are timed
    ctypes.CDLL(None).mallopt(-1, -1), ctypes.CDLL(None).mallopt(-4, 0)
scratch = torch.zeros(16 * 2**20, device="{device}")
wait = torch.cuda.synchronize if scratch.is_cuda else lambda: None
# of one thread its own time: that of other processes does not count
clock = time.thread_time if {threads} == 1 and not scratch.is_cuda else time.perf_counter
calls = {{  # arguments by position and by name
{arguments}
}}
times = {{layout: [] for layout in calls}}
for _ in range(20):
    for layout in [*calls, *reversed(calls)]:
        *arguments, options = calls[layout]
        scratch.add_(1)  # as in a step, the caches hold something else
        first = arguments[0]
        is_image = isinstance(first, torch.Tensor) and first.is_floating_point()
        if is_image and 0 not in first.stride():
            first.mul_(1)  # but the operator before has just written the input
        wait()
        started_at = clock()
        torch.ops.{call.operator}(*arguments, **options)
        wait()
        times[layout].append(1000 * (clock() - started_at))
for layout, found in times.items():
    print(f"{{layout:14}} {call.direction:9} {{min(found):10.4f}} ms (fastest of {{len(found)}})")
print(f"torch {{torch.__version__}}, {{platform.platform()}}, {{torch.get_num_threads()}} threads")
'''


class _Source(str):
    """Python source that stands for itself in a repr."""

    __repr__ = str.__str__


def reproduction(row: Row, model: str, device: str, *, tf32: bool = False) -> str:
    """A program of torch alone that times the one call of a row in both layouts, to be pasted into
    an issue.
    """
    (call,) = row.calls
    described = map_tensors(
        lambda t: _Source(f"tensor({tuple(t.shape)}, {t.stride()}, {t.dtype})"),
        call.arguments,
    )
    lines = "\n".join(f"    {layout!r}: {arguments!r}," for layout, arguments in described.items())
    kind, threads = device.partition(":")[0], torch.get_num_threads()
    return _PROGRAM.format(
        row=row,
        call=call,
        arguments=lines,
        model=model,
        device=kind,
        threads=threads,
        tf32=tf32,
    )
