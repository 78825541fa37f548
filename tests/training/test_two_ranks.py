"""Two ranks on gloo: they stay equal, stop together, and only rank 0 needs the run folder.

`main` runs in both of two forked processes; each rank writes what it saw to FOLDER/rank-<n>.json.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import load
from cl_train.data.device import Batch, DeviceFormat
from cl_train.step.precision import BY_NAME
from cl_train.system.distributed import Dist, gather_objects, processes
from cl_train.training import build
from cl_train.training import state as training_state
from cl_train.training.loop import train
from tests.conftest import Run, write_images
from tests.processes import LIMIT_S
from tests.ranks import fork_two_ranks
from tests.training.test_evaluation import check_report

pytestmark = pytest.mark.slow
Ranks = tuple[Path, list[dict[str, Any]]]


def rank() -> int:
    return int(os.environ["RANK"])


def settings(folder: Path, data: dict[str, Any] | None = None, **changes: Any) -> Config:
    data = {"name": "folder", "root": str(folder / "images"), "image_size": 32, "workers": 0, **(data or {})}
    words = {"model": "tests.networks:small", "device": "cpu", "precision": "fp32", "epochs": 2, "batch_size": 8}
    return load({**words, "log_every": 1, "log_to": [], "data": data, **changes})


def run(folder: Path, name: str, **changes: Any) -> int:
    return train(settings(folder, **changes), folder / name).exit_code


def weights_stay_equal_with_a_static_graph(folder: Path) -> list[bool]:
    """The trial step runs backward on the model itself, as on a GPU; then four steps."""
    cfg = settings(folder, ddp_static_graph=True, channels_last=True)
    precision, original, equal = BY_NAME["fp32"], build.wrap_in_ddp, []

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


def dropout_differs(folder: Path) -> Any:
    return {"code": run(folder, "dropout", max_steps=1, report=True), "next": torch.rand(1).item()}


def resume_reads_on_rank_0_alone(folder: Path) -> Any:
    """Rank 1 has no access to the run folder, as on another node without a shared disk. The images grow."""
    growing = {"size_schedule": [[0, 16], [1, 32]], "val_size": 24}
    first = run(folder, "resumed", max_steps=3, data=growing)
    if rank() == 1:
        training_state.load_for_resume = Mock(side_effect=AssertionError("rank 1 must not read"))
    return [first, run(folder, "resumed", resume="auto", data=growing)]


def other_settings_are_refused(folder: Path) -> Any:
    with pytest.raises(ConfigError) as caught:
        run(folder, "other", optim={"lr": 0.1 + rank()})
    return str(caught.value)


def runs_with_signals_to_rank_1(folder: Path) -> Any:
    kept = {"every_epochs": 0, "keep": 9}
    return [
        run(folder, "in-training", model="tests.networks:terminated_in_training"),
        run(folder, "in-evaluation", model="tests.networks:terminated_in_evaluation", batch_size=4),
        run(folder, "usr1", model="tests.networks:asked_to_save", checkpoint=kept, evaluate_every=-1),
    ]


def evaluation_is_eager_with_compile(folder: Path) -> Any:
    """`compile=true` compiles DDP's module in training, and not the module inside, which is evaluated."""
    cfg = settings(folder, compile=True)
    with processes("cpu", LIMIT_S) as dist:
        state = build.build_train_state(cfg, BY_NAME["fp32"], 3, dist, lr=0.1)
        return [state.model._compiled_call_impl is None, state.parts.model._compiled_call_impl is not None]


CASES = (weights_stay_equal_with_a_static_graph, dropout_differs, resume_reads_on_rank_0_alone)
CASES += (other_settings_are_refused, runs_with_signals_to_rank_1, evaluation_is_eager_with_compile)


def main(folder: Path) -> None:
    found = {case.__name__: case(folder) for case in CASES}
    (folder / f"rank-{rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("two-ranks")
    write_images(folder / "images", {"train": 16, "val": 7})
    fork_two_ranks(folder, partial(main, folder))
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_gradients_are_reduced_and_random_numbers_differ_and_the_evaluated_module_is_eager(ranks: Ranks) -> None:
    folder, (first, second) = ranks
    for found in ranks[1]:
        assert found["weights_stay_equal_with_a_static_graph"] == [True] * 4
        assert all(found["evaluation_is_eager_with_compile"])
    assert first["dropout_differs"]["code"] == 0
    assert first["dropout_differs"]["next"] != second["dropout_differs"]["next"]
    saved = Run(folder / "dropout", 0).checkpoint("step-00000001.pt")["progress"]["ranks"]
    assert len(saved) == 2 and not torch.equal(saved[0]["random"]["cpu"], saved[1]["random"]["cpu"])


def test_the_report_of_an_evaluation_has_the_images_of_both_ranks(ranks: Ranks) -> None:
    page, images = check_report(Run(ranks[0] / "dropout", 0), 21), ranks[0] / "images" / "val"
    assert all(page.count(f">{path.relative_to(images)}<") == 1 for path in images.glob("*/*"))


def test_rank_0_alone_reads_the_checkpoint_and_other_settings_are_refused(ranks: Ranks) -> None:
    folder, found = ranks
    assert [rank["resume_reads_on_rank_0_alone"] for rank in found] == [[0, 0], [0, 0]]
    resumed = Run(folder / "resumed", 0).records("train")
    assert [(r["step"], r["image_size"]) for r in resumed] == [(1, 16), (2, 16), (3, 16), (4, 32), (5, 32), (6, 32)]
    messages = [rank["other_settings_are_refused"] for rank in found]
    assert messages[0] == messages[1] and "optim.lr is 0.1 on rank 0 and 1.1 on rank 1" in messages[0]
    assert not (folder / "other" / "metrics.jsonl").exists()


def test_a_signal_to_one_rank_reaches_both(ranks: Ranks) -> None:
    folder, found = ranks
    assert [rank["runs_with_signals_to_rank_1"] for rank in found] == [[143, 143, 0]] * 2
    for case, steps in (("training", 2), ("evaluation", 6)):
        stopped = Run(folder / f"in-{case}", 143)
        assert (stopped.summary["status"], stopped.summary["steps"]) == ("interrupted", steps)
        assert stopped.checkpoint(f"step-{steps:08d}.pt") and stopped.records("val") == []
    names = {path.name for path in (folder / "usr1" / "checkpoints").iterdir()}
    assert names == {"step-00000002.pt", "step-00000006.pt"}, "USR1 saves, and training continues"
