"""Two ranks under torchrun on gloo: they stay equal, stop together, and only rank 0 needs the run folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import write_images
from tests.ranks import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two-ranks")
    write_images(folder / "images", {"train": 16, "val": 7})
    done = launch(2, "-m", "tests.training.two_ranks", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


Ranks = tuple[Path, list[dict[str, Any]]]


def records(folder: Path, kind: str, name: str = "step") -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if record["kind"] == kind]


def test_gradients_are_reduced_in_every_step_of_a_static_graph(ranks: Ranks) -> None:
    for found in ranks[1]:
        assert found["weights_stay_equal_with_a_static_graph"] == [True] * 4


def test_ranks_draw_different_random_numbers_and_each_is_saved(ranks: Ranks) -> None:
    folder, (first, second) = ranks
    assert first["dropout_differs"]["code"] == 0
    assert first["dropout_differs"]["next"] != second["dropout_differs"]["next"]
    saved = torch.load(folder / "dropout" / "checkpoints" / "step-00000001.pt", weights_only=True)["progress"]["ranks"]
    assert len(saved) == 2 and not torch.equal(saved[0]["random"]["cpu"], saved[1]["random"]["cpu"])


def test_the_report_of_an_evaluation_has_the_images_of_both_ranks(ranks: Ranks) -> None:
    folder, _ = ranks
    report = folder / "dropout" / "report"
    page = (report / "worst.html").read_text()
    files = sorted(path.relative_to(folder / "images" / "val") for path in (folder / "images" / "val").glob("*/*"))
    assert page.count("<figure") == len(files) == 21
    assert all(page.count(f">{file}<") == 1 for file in files)
    rows = [line.split(",") for line in (report / "per_class.csv").read_text().splitlines()[1:]]
    summary = json.loads((folder / "dropout" / "summary.json").read_text())
    assert sum(int(row[1]) for row in rows) == 21
    assert 100 * sum(int(row[2]) for row in rows) / 21 == pytest.approx(summary["val"]["top1"], abs=1e-3)


def test_rank_0_alone_reads_the_checkpoint(ranks: Ranks) -> None:
    folder, found = ranks
    assert [rank["resume_reads_on_rank_0_alone"] for rank in found] == [[0, 0], [0, 0]]
    assert records(folder / "resumed", "train") == [1, 2, 3, 4, 5, 6]
    assert records(folder / "resumed", "train", "image_size") == [16] * 3 + [32] * 3


def test_ranks_with_other_settings_are_refused_alike(ranks: Ranks) -> None:
    folder, (first, second) = ranks
    assert first["other_settings_are_refused"] == second["other_settings_are_refused"]
    assert "settings" in first["other_settings_are_refused"] and "rank 1" in first["other_settings_are_refused"]
    assert not (folder / "other" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("case", "steps"), [("training", 2), ("evaluation", 6)])
def test_a_signal_to_one_rank_stops_both_after_saving(ranks: Ranks, case: str, steps: int) -> None:
    folder, found = ranks
    assert [rank[f"a_signal_to_rank_1_in_{case}"] for rank in found] == [143, 143]
    run = folder / f"in-{case}"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", steps)
    assert (run / "checkpoints" / f"step-{steps:08d}.pt").is_file() and records(run, "val") == []


def test_usr1_to_any_rank_saves_and_training_continues(ranks: Ranks) -> None:
    folder, found = ranks
    assert [rank["usr1_to_rank_1_saves"] for rank in found] == [0, 0]
    names = {path.name for path in (folder / "usr1" / "checkpoints").iterdir()}
    assert names == {"step-00000002.pt", "step-00000006.pt"}


def test_the_evaluated_module_is_not_compiled(ranks: Ranks) -> None:
    assert all(all(found["evaluation_is_eager_with_compile"]) for found in ranks[1])
