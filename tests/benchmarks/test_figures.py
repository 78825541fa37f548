"""The numbers, tables and pictures of README and docs are those of results/."""

import json
import re

import pytest
from PIL import Image

from benchmarks import figures
from benchmarks.figures import BLOCK, BLOCKS, PAGES, PICTURE, ROOT, with_figures

RECORDS = sorted((ROOT / "results").glob("*.json"))
SOURCE = {
    "device_name": "AMD EPYC (2 threads)",
    "environment": {"torch": "2.15.0+cpu"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
}
# What was measured, for each record with timings.
RAW = {
    "models": lambda found: [s["block_ms"] for one in found["results"] for s in one["speeds"]],
    "time-to-accuracy": lambda found: [run["points"] for run in found["runs"]],
    "loader": lambda found: [row["block_s_per_image"] for row in found["rows"]],
    "overhead": lambda found: [found["bare_step_ms"], found["cl_train_step_ms"]],
    "updates": lambda found: [block for row in found["rows"] for block in row["block_ms"].values()],
    "aa-sweeps": lambda found: [one["images_per_s"] for one in found["sweeps"]],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_numbers_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert with_figures(text) == text, "python -m benchmarks.figures"
    assert text.count("<!-- figures:") == len(BLOCK.findall(text)) == text.count("<!-- end -->")


def test_every_block_is_on_a_page_and_nothing_else_in_the_readme_is_a_measured_ratio():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {name for _, name, _ in BLOCK.findall(text)} == set(BLOCKS)
    prose = BLOCK.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    own = [line for line in prose.splitlines() if "https://" not in line]
    assert not [line for line in own if re.search(r"\d\.\d+x", line)]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_what_was_measured_where(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    if path.stem.startswith("operators-"):
        assert found["torch"] and found["device"] and found["operators"]
        return
    raw = RAW[path.stem.removesuffix("-cpu")](found)
    assert raw and all(len(values) >= 2 for values in raw)
    assert found["device_name"] and found["environment"]["torch"]
    assert re.fullmatch(r"[0-9a-f]{40}", found["git"]["commit"])


def test_the_picture_shows_its_record():
    assert PICTURE.exists() == (figures.record("models") is not None)
    if PICTURE.exists():
        with Image.open(PICTURE) as image:
            assert image.info["record"] == figures.digest("models")


LOADERS = [("torchvision reference", 400, 1.0), ("timm", 500, 1.25), ("cl_train", 1000, 2.5)]
RATIOS = [("fp32", 1.2), ("fp32", 0.9), ("bf16", 1.5), ("bf16", 1.0)]
VERDICTS = {1.2: "faster", 0.9: "slower", 1.5: "faster", 1.0: "inconclusive"}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    models = [
        {"model": "a", "precision": name, "pairs": [{"ratio": ratio, "verdict": VERDICTS[ratio]}]}
        for name, ratio in RATIOS
    ]
    keys = ("pipeline", "images_per_s", "ratio")
    loaders = [dict(zip(keys, row, strict=True), workers=2) for row in LOADERS]
    sweeps = [
        {"beside": "nothing", "verdict": name, "n": 3} for name in ("no_difference", "faster")
    ]
    settings = {"batch_size": [16], "image_size": 160}
    for name, content in (
        ("models", {"settings": settings, "results": models}),
        ("loader", {"rows": loaders}),
        ("aa-sweeps", {"sweeps": sweeps}),
    ):
        (tmp_path / f"{name}-cpu.json").write_text(json.dumps(SOURCE | content))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)


@pytest.mark.parametrize(
    ("block", "row"),
    [
        (
            "headline",
            "bf16, channels_last | 1.22x | contiguous (geometric mean; 1 faster, 1 not decided) |",
        ),
        ("headline", "2 workers | 2.00x | timm |"),
        ("models", "| fp32 | 1.04x | 1 faster, 1 slower |"),
        ("loader", "| cl_train | 2 | 1,000 | 2.50 |"),
        ("sweeps", "| nothing | 2 | 1 | 3 |"),
        ("sweeps", "*AMD EPYC (2 threads), torch 2.15.0, commit 0123456789.*"),
    ],
)
def test_a_block_is_made_from_its_record_and_an_edited_number_is_found(block, row, planted):
    page = with_figures(f"before\n<!-- figures: {block} -->\nold\n<!-- end -->\nafter")
    assert row in page and page.startswith("before\n") and page.endswith("\nafter")
    edited = page.replace(row, re.sub(r"\d", lambda digit: str(9 - int(digit[0])), row))
    assert edited != page and with_figures(edited) == page
