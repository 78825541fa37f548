"""Two ranks on gloo: they stay equal, stop together, and only rank 0 needs the run folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import write_images
from tests.faults.forkserver import ForkServer
from tests.ranks import fork_two_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two-ranks")
    write_images(folder / "images", {"train": 16, "val": 7})
    fork_two_ranks(fork_server, folder, "tests.training.two_ranks:main", str(folder))
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


Ranks = tuple[Path, list[dict[str, Any]]]


def records(folder: Path, kind: str, name: str = "step") -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if record["kind"] == kind]


def test_gradients_are_reduced_and_random_numbers_differ_and_the_evaluated_module_is_eager(ranks: Ranks) -> None:
    folder, (first, second) = ranks
    for found in ranks[1]:
        assert found["weights_stay_equal_with_a_static_graph"] == [True] * 4
        assert all(found["evaluation_is_eager_with_compile"])
    assert first["dropout_differs"]["code"] == 0
    assert first["dropout_differs"]["next"] != second["dropout_differs"]["next"]
    saved = torch.load(folder / "dropout" / "checkpoints" / "step-00000001.pt", weights_only=True)["progress"]["ranks"]
    assert len(saved) == 2 and not torch.equal(saved[0]["random"]["cpu"], saved[1]["random"]["cpu"])


def test_the_report_of_an_evaluation_has_the_images_of_both_ranks(ranks: Ranks) -> None:
    report, images = ranks[0] / "dropout" / "report", ranks[0] / "images" / "val"
    page = (report / "worst.html").read_text()
    assert page.count("<figure") == 21
    assert all(page.count(f">{path.relative_to(images)}<") == 1 for path in images.glob("*/*"))
    rows = [line.split(",") for line in (report / "per_class.csv").read_text().splitlines()[1:]]
    summary = json.loads((ranks[0] / "dropout" / "summary.json").read_text())
    assert sum(int(row[1]) for row in rows) == 21
    assert 100 * sum(int(row[2]) for row in rows) / 21 == pytest.approx(summary["val"]["top1"], abs=1e-3)


def test_rank_0_alone_reads_the_checkpoint_and_other_settings_are_refused(ranks: Ranks) -> None:
    folder, found = ranks
    assert [rank["resume_reads_on_rank_0_alone"] for rank in found] == [[0, 0], [0, 0]]
    assert records(folder / "resumed", "train") == [1, 2, 3, 4, 5, 6]
    assert records(folder / "resumed", "train", "image_size") == [16] * 3 + [32] * 3
    messages = [rank["other_settings_are_refused"] for rank in found]
    assert messages[0] == messages[1] and "optim.lr is 0.1 on rank 0 and 1.1 on rank 1" in messages[0]
    assert not (folder / "other" / "metrics.jsonl").exists()


def test_a_signal_to_one_rank_reaches_both(ranks: Ranks) -> None:
    folder, found = ranks
    assert [rank["runs_with_signals_to_rank_1"] for rank in found] == [[143, 143, 0]] * 2
    for case, steps in (("training", 2), ("evaluation", 6)):
        run = folder / f"in-{case}"
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("interrupted", steps)
        assert (run / "checkpoints" / f"step-{steps:08d}.pt").is_file() and records(run, "val") == []
    names = {path.name for path in (folder / "usr1" / "checkpoints").iterdir()}
    assert names == {"step-00000002.pt", "step-00000006.pt"}, "USR1 saves, and training continues"
