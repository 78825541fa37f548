"""A program of torch alone that times one operator call in both layouts, to be pasted into an issue."""

from typing import Any

import torch

from cl_train.memory_format.operator_times import Row

_PROGRAM = '''"""{title}

In a step of {model}: {contiguous_ms:.3g} ms contiguous, {channels_last_ms:.3g} ms channels_last (torch {torch}).
"""
import platform, time, torch

def tensor(shape, strides, dtype):
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides))
    values = torch.rand(size) if shape and dtype.is_floating_point else torch.zeros(size)
    return values.to(device, dtype).as_strided(shape, strides)

def milliseconds(work):
    scratch.add_(1)  # as in a step, the caches hold something else
    wait()
    started_at = time.perf_counter()
    result = work()
    wait()
    return 1000 * (time.perf_counter() - started_at), result

device = "{device}"
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
torch.set_num_threads({threads})
scratch = torch.zeros(16 * 2**20, device=device)
operator = torch.ops.{operator}
calls = {{
{calls}
}}
times = {{}}
for _ in range(20):
    for layout in [*calls, *reversed(calls)]:
        arguments, options = calls[layout]
        tensors = [
            a for a, formal in zip(arguments, operator._schema.arguments)
            if isinstance(a, torch.Tensor) and a.is_floating_point() and "running" not in formal.name
        ]
        leaves = [a.requires_grad_() for a in tensors] if {differentiable} else []
        ms, result = milliseconds(lambda: operator(*arguments, **options))
        times.setdefault(f"{{layout:14}} {direction}", []).append(ms)
        result = result[0] if isinstance(result, (tuple, list)) else result
        if leaves and result.requires_grad:
            gradient = torch.rand_like(result)
            ms, _ = milliseconds(lambda: torch.autograd.grad(result, leaves, gradient, allow_unused=True))
            times.setdefault(f"{{layout:14}} backward", []).append(ms)
for what, found in times.items():
    print(f"{{what:24}} {{min(found):10.4f}} ms (fastest of {{len(found)}})")
print(f"torch {{torch.__version__}}, {{platform.platform()}}, {{torch.get_num_threads()}} threads")
'''


def reproduction(row: Row, model: str, device: str) -> str:
    """The source of the program, for the operator, shapes, strides and dtypes of a row with one call."""
    (call,) = row.calls
    lines = []
    for layout, arguments in call.arguments.items():
        *positional, options = map(_source, arguments)
        lines.append(f'    "{layout}": (({", ".join(positional)},), {options}),')
    return _PROGRAM.format(
        title=row.name, direction=call.direction, model=model, torch=torch.__version__, device=device.partition(":")[0],
        contiguous_ms=row.contiguous_ms, channels_last_ms=row.channels_last_ms, threads=torch.get_num_threads(),
        operator=call.operator, calls="\n".join(lines),
        differentiable=call.direction == "forward" and not call.operator.split(".")[1].endswith("_"),
    )  # fmt: skip


def _source(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor({tuple(value.shape)}, {value.stride()}, {value.dtype})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_source(item)}' for key, item in value.items())}}}"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return f"float('{value}')" if isinstance(value, float) else repr(value)  # inf and nan have no literal
