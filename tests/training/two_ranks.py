"""Runs of `train` on two ranks, in processes that test_two_ranks.py forks.

Each rank writes what it saw to FOLDER/rank-<n>.json.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import load
from cl_train.data.device import Batch, DeviceFormat
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import Dist, gather_objects, processes
from cl_train.training import build, loop
from cl_train.training import state as training_state
from tests.processes import LIMIT_S

RANK = int(os.environ["RANK"])


def settings(folder: Path, data: dict[str, Any] | None = None, **changes: Any) -> Config:
    data = {"name": "folder", "root": str(folder / "images"), "image_size": 32, "workers": 0, **(data or {})}
    words = {"model": "tests.networks:small", "device": "cpu", "precision": "fp32", "epochs": 2, "batch_size": 8}
    return load({**words, "log_every": 1, "log_to": [], "data": data, **changes})


def weights_stay_equal_with_a_static_graph(folder: Path) -> list[bool]:
    """The trial step runs backward on the model itself, as on a GPU; then four steps."""
    cfg = settings(folder, ddp_static_graph=True, channels_last=True)
    precision, original, equal = resolve_precision("fp32", torch.device("cpu")), build.wrap_in_ddp, []

    def try_first(model: Any, dist: Dist, *, static_graph: bool) -> Any:
        build.try_model.__wrapped__(cfg, model, precision, 3, DeviceFormat(dist.device, None, torch.channels_last))
        return original(model, dist, static_graph=static_graph)

    build.wrap_in_ddp = try_first
    with processes("cpu", LIMIT_S) as dist:
        torch.manual_seed(0)
        state = build.build_train_state(cfg, precision, 3, dist, lr=0.5)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.rank)
            images = torch.randn(8, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
            state.train_step([Batch(images, torch.randint(3, (8,), generator=generator))])
            sums = gather_objects([parameter.sum().item() for parameter in state.model.parameters()], dist)
            equal.append(sums[0] == sums[1])
    build.wrap_in_ddp = original
    return equal


def train(cfg: Config, folder: Path) -> int:
    return loop.train(cfg, folder).exit_code


def dropout_differs(folder: Path) -> Any:
    code = train(settings(folder, max_steps=1, report=True), folder / "dropout")
    return {"code": code, "next": torch.rand(1).item()}


def resume_reads_on_rank_0_alone(folder: Path) -> Any:
    """Rank 1 has no access to the run folder, as on another node without a shared disk. The images grow."""
    growing = {"size_schedule": [[0, 16], [1, 32]], "val_size": 24}
    first = train(settings(folder, max_steps=3, data=growing), folder / "resumed")
    if RANK == 1:
        training_state.load_for_resume = _forbidden  # type: ignore[assignment]
    second = train(settings(folder, resume="auto", data=growing), folder / "resumed")
    return [first, second]


def _forbidden(*arguments: object) -> None:
    raise AssertionError("rank 1 must not read")


def other_settings_are_refused(folder: Path) -> Any:
    try:
        train(settings(folder, optim={"lr": 0.1 + RANK}), folder / "other")
    except ConfigError as error:
        return str(error)
    return None


def runs_with_signals_to_rank_1(folder: Path) -> Any:
    every = {"every_epochs": 0, "keep": 9}
    in_training = settings(folder, model="tests.networks:terminated_in_training")
    in_evaluation = settings(folder, model="tests.networks:terminated_in_evaluation", batch_size=4)
    usr1 = settings(folder, model="tests.networks:asked_to_save", checkpoint=every, evaluate_every=-1)
    codes = [train(in_training, folder / "in-training"), train(in_evaluation, folder / "in-evaluation")]
    return [*codes, train(usr1, folder / "usr1")]


def evaluation_is_eager_with_compile(folder: Path) -> Any:
    """`compile=true` compiles DDP's module in training, and not the module inside, which is evaluated."""
    cfg = settings(folder, compile=True)
    with processes("cpu", LIMIT_S) as dist:
        state = build.build_train_state(cfg, resolve_precision("fp32", dist.device), 3, dist, lr=0.1)
        return [state.model._compiled_call_impl is None, state.parts.model._compiled_call_impl is not None]


CASES: list[Callable[[Path], Any]] = [
    weights_stay_equal_with_a_static_graph,
    dropout_differs,
    resume_reads_on_rank_0_alone,
    other_settings_are_refused,
    runs_with_signals_to_rank_1,
    evaluation_is_eager_with_compile,
]


def main(folder: str) -> None:
    found = {case.__name__: case(Path(folder)) for case in CASES}
    (Path(folder) / f"rank-{RANK}.json").write_text(json.dumps(found))
