"""Checks whether every operator call of a step computes the same on inputs in channels_last.

Each distinct call is replayed by itself on copies of its inputs, in their own strides and
contiguous, so that neither a scale of zero nor rounding elsewhere can hide a wrong kernel.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from cl_train.memory_format.audit_report import Origin
from cl_train.memory_format.operator_recorder import (
    COPIES,
    UNDECLARED_VIEWS,
    OriginRecorder,
    name_of,
    schema_of,
)
from cl_train.step.backup import random_state_restored
from cl_train.system.tensors import map_leaves, map_tensors, tensors_in

# Limits in fp32: times the change that one rounding of the inputs makes. The results of 51 correct
# models reached 0.4 of it.
FP32_ROUNDINGS = 64
FP32_ROUNDINGS_CUDA = 1024  # Winograd kernels of cuDNN are less exact; not measured here
# Limits as multiples of the contiguous error against a more exact run, plus roundings of the
# result: for each call in 16 bits; for modules in fp32, which sum in other orders (coatnet: 8).
ERRORS_16_BIT, ROUNDINGS_16_BIT = 4, 1
ERRORS_FP32 = 16
INDEX_LIMIT = 0.01  # ties of a maximum may be broken differently
OF_MEMORY = ("as_strided", "empty")  # results depend on strides by definition, or hold no values
_FACTORIES = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like"}
_WITHOUT_VALUES = {*COPIES, *UNDECLARED_VIEWS, *_FACTORIES}
_16_BIT = {torch.float16, torch.bfloat16}
_NOT_FINITE_RTOL = 0.1  # of the finite elements of a result that has others
_SEED = 3


@dataclass(frozen=True)
class WrongCall:
    """A call whose result differs in channels_last; `error` in multiples of its limit."""

    operator: str  # such as "aten.avg_pool2d_backward.default"
    origin: Origin
    shape: tuple[int, ...] | None  # of its first tensor
    error: float
    relative_error: float  # L2 distance / L2 norm of the contiguous result

    @property
    def where(self) -> str:
        name = self.operator.removeprefix("aten.").partition(".")[0]
        module = f"{self.origin.module or 'the model'} ({self.origin.module_type})"
        source = self.origin.source
        line = f", {source} `{self.origin.line}`" if source else ""
        return f"{name} ({self.origin.direction}) of {module}{line}"

    def __str__(self) -> str:
        deviates = f"channels_last deviates {100 * self.relative_error:.2g} % from contiguous"
        shape = f" (input {list(self.shape)})" if self.shape is not None else ""
        return f"{self.where}: {deviates}, {self.error:.2g} of the limit{shape}"


class KernelCheck(OriginRecorder):
    """Replays the distinct operator calls of the block that read images in channels_last."""

    def __init__(self, *, replays: bool = True) -> None:
        super().__init__()
        self._replays = replays
        # Calls that compute, or that read an image by strides, by module and direction.
        self.operators: Counter[tuple[str, str, str]] = Counter()
        self.wrong: list[WrongCall] = []
        self.calls = 0  # number of replayed calls
        self.worst: WrongCall | None = None  # by error, also below the limit
        self.unchecked: set[str] = set()  # operators that could not be replayed
        self._seen: set[Any] = set()

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = None
        is_permuted = any(map(_is_permuted, tensors_in((args, kwargs))))
        if self._replays and is_permuted and computes(function):
            key = _key_of(function, args, kwargs)
            if key not in self._seen:
                self._seen.add(key)
                call = args, kwargs
                if _written_arguments(function):  # copied before it writes
                    call = copied(call, same_strides)
        result = function(*args, **kwargs)
        origin, name = self.origin(function), name_of(function)
        is_read_by_strides = is_permuted and "as_strided" in name
        has_values = computes(function) and name not in _WITHOUT_VALUES
        if (has_values or is_read_by_strides) and origin.module_type != "Parameter":
            self.operators[origin.module, origin.direction, name] += 1
        if call is not None:
            self._replay(function, *call, origin)
        return result

    def _replay(self, function: Any, args: Any, kwargs: Any, origin: Origin) -> None:
        self.calls += 1
        first = tensors_in((args, kwargs))[0]
        try:
            with random_state_restored(first.device):
                errors = _errors(function, (args, kwargs))
        except Exception:  # an operator may take no copies, or not these dtypes
            self.unchecked.add(str(function))
            return
        for error, relative in errors.values():
            call = WrongCall(str(function), origin, tuple(first.shape), error, relative)
            if self.worst is None or not error <= self.worst.error:
                self.worst = call
            if not error <= 1:
                self.wrong.append(call)


@cache
def computes(function: Any) -> bool:
    """Whether the result of the operator has values of its own."""
    return not function.is_view and all(word not in name_of(function) for word in OF_MEMORY)


@cache
def _written_arguments(function: Any) -> list[tuple[int, str]]:
    """Returns positions and names of the arguments that the operator writes: batch_norm does not
    declare its running statistics.
    """
    return [
        (position, argument.name)
        for position, argument in enumerate(getattr(schema_of(function), "arguments", ()))
        if argument.name.startswith("running_")
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def _is_permuted(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and tensor.dim() >= 3 and tensor.numel() > 1
    return is_plain and not tensor.is_contiguous()


def _key_of(function: Any, args: Any, kwargs: Any) -> Any:
    tensors = tensors_in((args, kwargs))
    layouts = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    others = map_tensors(lambda _: None, (args, kwargs))
    return function, layouts, repr(others)


# --- replays --------------------------------------------------------------------------------------

Values = Any  # tensors in nested tuples, lists and dicts: the arguments of a call
Results = Mapping[Any, torch.Tensor]  # by name
Run = Callable[[Values], Results]
# Takes a result's name, its contiguous values, and those of a more exact run or of shaken inputs.
Limit = Callable[[Any, torch.Tensor, torch.Tensor], float]
Errors = dict[Any, tuple[float, float]]  # by result: in multiples of its limit, and relative


def compare_results(run: Run, call: Values) -> Errors:
    """Returns the errors of `run` on `call` against contiguous copies, in multiples of what
    rounding explains.
    """
    contiguous = copied(call, torch.Tensor.contiguous)
    found, expected = run(call), run(contiguous)
    tensors = tensors_in((call, expected))
    if dtypes := _16_BIT & {tensor.dtype for tensor in tensors}:
        dtype = max(dtypes, key=lambda one: torch.finfo(one).eps)
        exact = run(map_leaves(_in_fp32, contiguous))
        return compared(found, expected, exact, partial(limit_by_exact, dtype=dtype))
    generator = torch.Generator().manual_seed(_SEED)
    shaken = run(copied(contiguous, partial(_shaken, generator=generator)))
    longest = max(tensor.numel() for tensor in tensors)
    return compared(found, expected, shaken, partial(limit_by_shaken, longest=longest))


def _errors(function: Any, call: Values) -> Errors:
    run = partial(_results, function)
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    if is_random and "attention" not in function.name():
        halves = copied(call, _half)
        found, expected = (  # the same numbers in another order
            {name: one.flatten().float().sort().values for name, one in run(values).items()}
            for values in (halves, copied(halves, torch.Tensor.contiguous))
        )
        return compared(found, expected, expected, partial(limit_by_shaken, longest=1))
    generator = torch.Generator().manual_seed(_SEED)
    values = copied(call, partial(_without_constants, generator=generator))
    return compare_results(run, values)


def _results(function: Any, call: Values) -> Results:
    """Returns the tensors that a call returns or writes; its arguments stay as they are."""
    written = _written_arguments(function)
    args, kwargs = copied(call, same_strides) if written else call
    if torch.Tag.nondeterministic_seeded in function.tags:
        torch.manual_seed(_SEED)
    results = tensors_in(function(*args, **kwargs))
    for position, name in written:
        value = args[position] if position < len(args) else kwargs.get(name)
        results += [t for t in tensors_in(value) if not any(t is one for one in results)]
    return dict(enumerate(results))


def compared(found: Results, expected: Results, other: Results, limit: Limit) -> Errors:
    """Returns the errors of `found` against `expected`; `limit` gets the values of `other`."""
    errors: Errors = {}
    for name in {**expected, **found}:
        if name not in found or name not in expected:
            errors[name] = math.inf, math.inf
            continue
        x, y = as_real(found[name]), as_real(expected[name])
        error = _error_of_kind(x, y)
        if error is None:
            distance, norm = norm_of(x - y), norm_of(y)
            allowed = limit(name, y, as_real(other[name])) if distance else 1.0
            error = distance / allowed if allowed else math.inf, distance / (norm or 1.0)
        errors[name] = error
    return errors


def limit_by_shaken(_: Any, y: torch.Tensor, shaken: torch.Tensor, longest: int) -> float:
    """Returns the largest error that is allowed. `shaken`: the result of inputs that differ by one
    rounding. `longest`: the elements of the largest tensor, as no sum has more terms.
    """
    least = FP32_ROUNDINGS_CUDA if y.is_cuda else FP32_ROUNDINGS
    roundings = max(least, 8 * math.sqrt(longest / y.numel()))
    return _chance(y) * roundings * (norm_of(shaken - y) + _epsilon(y) * norm_of(y))


def limit_by_exact(_: Any, y: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Returns the largest error that is allowed. `dtype`: the least exact one that was used."""
    times, roundings = ERRORS_FP32, FP32_ROUNDINGS
    if dtype in _16_BIT:
        times, roundings = ERRORS_16_BIT, ROUNDINGS_16_BIT
    rounded = roundings * torch.finfo(dtype).eps * norm_of(exact)
    return _chance(y) * (times * norm_of(y - exact) + rounded)


def _error_of_kind(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float] | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf, math.inf
    if not y.numel():
        return 0.0, 0.0
    if not y.is_floating_point():
        differing = float((x != y).float().mean())
        return differing / INDEX_LIMIT, differing
    finite = y.isfinite() & x.isfinite()
    if not finite.all():
        is_alike = torch.equal(y.isfinite(), x.isfinite()) and torch.allclose(
            x[finite].float(), y[finite].float(), rtol=_NOT_FINITE_RTOL
        )
        return (0.0, 0.0) if is_alike else (math.inf, math.inf)
    return None


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _chance(tensor: torch.Tensor) -> float:
    """Returns a factor for limits: a single number may be exact by chance, many are not."""
    return 1 + 15 / tensor.numel()


def norm_of(tensor: torch.Tensor) -> float:
    """Returns the L2 norm; waits for the device."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _epsilon(tensor: torch.Tensor) -> float:
    is_tf32 = tensor.is_cuda and torch.backends.cudnn.allow_tf32 and tensor.dtype == torch.float32
    return 2.0**-10 if is_tf32 else torch.finfo(tensor.dtype).eps


# --- copies of arguments --------------------------------------------------------------------------


def copied(call: Values, copy: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    """Returns `call` with a `copy` of each tensor; a tensor that stands twice is copied once."""
    copies: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy(tensor)
        return copies[id(tensor)]

    return map_tensors(once, call)


def same_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in the same strides, also with gaps; an expanded dimension stays expanded."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        return tensor.clone()
    base = tensor
    for dim, stride in enumerate(tensor.stride()):
        base = base.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else base
    copied = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device)
    try:
        return copied.copy_(base).expand(tensor.shape)
    except RuntimeError:  # elements overlap in memory
        return tensor.clone()


def _without_constants(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns positive noise instead of equal elements, as in gradients behind a scale of zero."""
    is_writable = tensor.is_floating_point() and tensor.numel() > 1 and 0 not in tensor.stride()
    if not is_writable or bool(tensor.amin() != tensor.amax()):
        return tensor
    return same_strides(tensor).copy_(0.5 + torch.rand(tensor.shape, generator=generator))


def _half(tensor: torch.Tensor) -> torch.Tensor:
    is_writable = tensor.is_floating_point() and 0 not in tensor.stride()
    return same_strides(tensor).fill_(0.5) if is_writable else tensor


def _shaken(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns `tensor` with each element smaller or larger by about one rounding."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32) - 0.5
    return tensor * (1 + 4 * _epsilon(tensor) * noise.to(tensor.device))


def _in_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _16_BIT else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _16_BIT else value
