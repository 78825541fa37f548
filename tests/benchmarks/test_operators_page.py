"""docs/operators.md is what results/ says."""

from pathlib import Path

from benchmarks.operators_page import main

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    main(str(tmp_path / "operators.md"), *map(str, ROOT.glob("results/operators-*.json")))
    assert (tmp_path / "operators.md").read_text() == (ROOT / "docs/operators.md").read_text()
