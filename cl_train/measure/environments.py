"""One model in two environments: this one, and another Python or other environment variables.

A child process of each environment runs `environment_runner.py`. The two stay alive and take turns
in blocks A B B A, so the drift of the machine cancels. They load the same weights and the same
batch from files. Environments that compute something else are not comparable.

Two processes of one environment differ by some percent, which more rounds only confirm: several
pairs of processes are measured, and the interval is over the pairs.
"""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean
from typing import Any

import torch

from cl_train.config.environment import Environment, parse_environment
from cl_train.config.schema import HERE, BenchmarkSettings
from cl_train.errors import ConfigError
from cl_train.measure import environment_runner
from cl_train.measure.statistics import Alternation, alternate, verdict_of
from cl_train.measure.timed_step import input_shape, noise
from cl_train.models import sources as models
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.processes import TOO_BUSY_PCT, MachineLoad

BLOCK_S = 0.3
# Relative distances above which two environments compute different things. Versions of torch choose
# other algorithms, so even fp32 differs by rounding; a wrong kernel differs by whole values.
_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 3e-2, "bf16": 1e-1}
_LEAST_PAIRS = 4  # of processes
_PAIR_S = 15.0  # of the rounds of a pair
_PROFILED_STEPS = 7
_SHOWN_OPERATORS = 5
_LEAST_SHOWN_SHARE = 0.01  # of the step: smaller differences of an operator are noise
# A script's own folder would come first on the path, and this folder holds a statistics.py.
_RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


class Runner:
    """The child process of one environment."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._process = subprocess.Popen(
            [environment.python, "-c", _RUN_FILE, environment_runner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment.variables,
        )

    def ask(self, **request: Any) -> Any:
        """The answer to a request. Raises ConfigError: it failed, or the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ConfigError(
                f"against={self.environment.name}: its process ended with code {code} (see above); "
                "it needs torch 2.4 and torchvision 0.19 or later"
            )
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ConfigError(f"{self.environment.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def compare_environments(settings: BenchmarkSettings, model: str, layout: str) -> dict[str, Any]:
    """A pair, with the keys of a sweep's comparison: this environment is the candidate,
    `settings.against` the baseline. Raises ConfigError: an environment cannot run the model.
    """
    device = choose_device(settings.device)
    precision = resolve_precision(settings.precision[0], device).name
    if precision not in _TOLERANCE:
        raise ConfigError(f"precision={precision}: against= takes {', '.join(_TOLERANCE)}")
    environments = [parse_environment(settings.against, "against"), parse_environment([HERE])]
    time_limit_s = 60.0 if settings.time_limit_s is None else settings.time_limit_s
    count = max(_LEAST_PAIRS, 2 * round(time_limit_s / _PAIR_S / 2))
    load = MachineLoad()
    pairs: list[_ProcessPair] = []
    with _files(settings, model, layout, device, precision) as request:
        while len(pairs) < count:
            # The first process may be slower for it: the order alternates.
            order = slice(None, None, -1 if len(pairs) % 2 else 1)
            with ExitStack() as stack:
                runners = [
                    stack.enter_context(closing(Runner(environment)))
                    for environment in environments[order]
                ]
                is_profiled = settings.time and not pairs
                limit_s = time_limit_s / count
                pairs.append(_measured_pair(runners[order], request, limit_s, is_profiled))
            done = _over_pairs(pairs)
            ratio = done.speed_ratios()[1]
            if len(pairs) >= _LEAST_PAIRS and ratio.width <= settings.target_ci:
                break
    others_pct = load.others_pct()
    is_busy = device.type == "cpu" and (others_pct or 0.0) >= TOO_BUSY_PCT
    distance = max(pair.distance for pair in pairs)

    notes = []
    if distance > _TOLERANCE[precision]:
        notes.append(f"they compute something else: results differ by {distance:.2g}")
    elif is_busy and not all(pair.is_one_thread for pair in pairs):
        notes.append(f"other processes used {others_pct:.0f} % of the cores")
    operators = {"operators": _moved_operators(*pairs[0].operator_ms)} if settings.time else {}
    speeds = [round(settings.batch_size[0] / fmean(times_s), 2) for times_s in done.blocks]
    return {
        "model": model,
        "layout": layout,
        "precision": precision,
        "baseline": environments[0].name,
        "candidate": environments[1].name,
        "baseline_images_per_s": speeds[0],
        "candidate_images_per_s": speeds[1],
        **ratio.to_dict(),
        "verdict": "not_comparable" if notes else verdict_of(ratio),
        "notes": notes,
        "parity": {"relative_distance": distance, "limit": _TOLERANCE[precision]},
        "versions": dict(zip(("baseline", "candidate"), pairs[0].versions, strict=True)),
        "others_pct": others_pct,
        "seconds": round(done.seconds, 1),
        **operators,
    }


@dataclass(frozen=True)
class _ProcessPair:
    """What a process of each environment measured; the baseline is the first of each list."""

    rounds: Alternation
    versions: list[dict[str, Any]]
    is_one_thread: bool
    distance: float
    operator_ms: list[dict[str, float]]  # empty if not profiled


def _measured_pair(
    runners: list[Runner], request: dict[str, Any], time_limit_s: float, is_profiled: bool
) -> _ProcessPair:
    results = [runner.ask(**request) for runner in runners]
    versions = [result["versions"] for result in results]
    is_one_thread = all(each["threads"] == 1 for each in versions)
    # A thread's own time leaves out that of other processes.
    clock = "thread_time" if request["device"] == "cpu" and is_one_thread else "perf_counter"
    blocks = [partial(runner.ask, do="block_s", clock=clock) for runner in runners]
    steps = max(1, math.ceil(BLOCK_S / max(block(steps=2) for block in blocks)))
    rounds = alternate(
        [partial(block, steps=steps) for block in blocks], target_ci=0.0, time_limit_s=time_limit_s
    )
    profiled = runners if is_profiled else []
    operator_ms = [runner.ask(do="operator_ms", steps=_PROFILED_STEPS) for runner in profiled]
    return _ProcessPair(rounds, versions, is_one_thread, _distance(*results), operator_ms)


def _over_pairs(pairs: list[_ProcessPair]) -> Alternation:
    """Each pair of processes as one round, of its mean even and odd blocks."""
    blocks = [
        [geometric_mean(pair.rounds.blocks[side][half::2]) for pair in pairs for half in (0, 1)]
        for side in (0, 1)
    ]
    return Alternation(blocks, sum(pair.rounds.seconds for pair in pairs), "time_limit")


@contextmanager
def _files(
    settings: BenchmarkSettings, name: str, layout: str, device: torch.device, precision: str
) -> Iterator[dict[str, Any]]:
    """The request that prepares a model, and the files of weights and batch that it names."""
    shape = input_shape(name, settings.image_size, settings.frames)
    batch_size = settings.batch_size[0]
    torch.manual_seed(0)
    model = models.build_model(name, num_classes=1000, image_size=shape[-1])
    targets = torch.randint(1000, (batch_size,))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/weights.pt")
        torch.save((noise((batch_size, *shape)), targets), f"{folder}/batch.pt")
        yield {
            "model": name,
            "options": models.size_options(name, shape[-1]),
            "weights": f"{folder}/weights.pt",
            "batch": f"{folder}/batch.pt",
            "mode": settings.mode[0],
            "precision": precision,
            "device": str(device),
            "channels_last": layout == "channels_last",
            "compile": settings.compile[0],
        }


def _distance(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """The larger relative distance of the logits and of the gradients' norms; infinite for NaN."""
    distances = []
    for key in ("logits", "gradient_norms"):
        difference = math.dist(one[key], other[key])
        scale = math.hypot(*one[key])
        distances.append(difference / scale if scale else difference)
    return max(d if math.isfinite(d) else math.inf for d in distances)


def _moved_operators(before: dict[str, float], after: dict[str, float]) -> list[dict[str, Any]]:
    """The operators whose own time differs most, in ms per step; the largest difference first.

    A difference below 1 % of the step is left out.
    """
    least_ms = _LEAST_SHOWN_SHARE * sum(after.values())
    rows: list[dict[str, Any]] = [
        {
            "operator": name,
            "baseline_ms": round(before.get(name, 0.0), 3),
            "candidate_ms": round(after.get(name, 0.0), 3),
        }
        for name in before.keys() | after.keys()
        if abs(after.get(name, 0.0) - before.get(name, 0.0)) >= least_ms
    ]
    rows.sort(key=lambda row: -abs(row["candidate_ms"] - row["baseline_ms"]))
    return rows[:_SHOWN_OPERATORS]


def describe(pair: dict[str, Any]) -> str:
    """The pair as text: versions, speeds, ratio and verdict, notes, operators."""
    lines = [f"{pair['model']}, {pair['layout']}, {pair['precision']}"]
    for side, v in pair["versions"].items():
        cuda = f", CUDA {v['cuda']}, cuDNN {v['cudnn']}" if v["cuda"] else ""
        what = f"torch {v['torch']}, Python {v['python']}, {v['threads']} threads{cuda}"
        lines.append(f"  {pair[f'{side}_images_per_s']:10.1f} images/s  {pair[side]}: {what}")
    low, high = pair["ci95"] or (0.0, math.inf)
    verdict = "; ".join([pair["verdict"].replace("_", " "), *pair["notes"]])
    ratio = f"{pair['ratio']:.3f}x [{low:.3f}, {high:.3f}]"
    lines.append(f"  this environment is {ratio} as fast: {verdict}")
    if pair.get("operators") == []:
        lines.append("  no operator differs by 1 % of the step")
    for row in pair.get("operators", []):
        change = row["candidate_ms"] - row["baseline_ms"]
        times = f"{row['baseline_ms']:.3f} to {row['candidate_ms']:.3f} ms"
        lines.append(f"  {change:+8.3f} ms per step in {row['operator']} ({times})")
    return "\n".join(lines)
