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


def planted_models():
    results = []
    for precision, ratios in (("fp32", (1.2, 0.9)), ("bf16", (1.5, 1.0))):
        for model, ratio in zip(("resnet18", "vgg11"), ratios, strict=True):
            verdict = "faster" if ratio > 1 else "slower" if ratio < 1 else "inconclusive"
            ci95 = [ratio - 0.1, ratio + 0.1]
            pair = {"ratio": ratio, "ci95": ci95, "n": 8, "verdict": verdict}
            results.append({"model": model, "precision": precision, "pairs": [pair]})
    return {"settings": {"batch_size": [16], "image_size": 160}, "results": results}


def planted_accuracy():
    summary = {}
    for name, reached, target_s, epoch_s in (
        ("cl_train", 8, [20.0, 18.0, 25.0], [2.0, 1.9, 2.2]),
        ("timm, recipe of train.py", 3, None, [2.5, 2.4, 2.9]),
    ):
        of_run = {"runs": 8, "reached": reached, "target_s": target_s, "epoch_s": epoch_s}
        of_run["share_of_floor"] = [0.9, 0.8, 1.0]
        ratios = {"target": None, "epoch": [epoch_s[0] / 2, 1.0, 2.0]}
        summary[name] = of_run | {"first_s": [7.0, 6.0, 8.0], "theirs_over_ours": ratios}
    return {"target_top1": 95.0, "summary": {"digits": summary}}


def rows(keys, *values, **same):
    return [dict(zip(keys.split(), row, strict=True), **same) for row in values]


LOADERS = [("torchvision reference", 400, 1.0), ("timm", 500, 1.25), ("cl_train", 1000, 2.5)]
SWEEPS = [
    ("nothing", "no_difference", 4),
    ("nothing", "faster", 2),
    ("a busy process", "inconclusive", 12),
]
CONTENTS = {
    "models": planted_models(),
    "time-to-accuracy": planted_accuracy(),
    "loader": {"rows": rows("pipeline images_per_s ratio", *LOADERS, workers=2)},
    "overhead": {
        "ratio": 0.99,
        "ratios": [0.97, 0.99, 1.01],
        "settings": {"model": "resnet18", "image_size": 128},
    },
    "aa-sweeps": {"sweeps": rows("beside verdict n", *SWEEPS)},
}
PLANTED = {name: SOURCE | content for name, content in CONTENTS.items()}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    for name, content in PLANTED.items():
        (tmp_path / f"{name}-cpu.json").write_text(json.dumps(content))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("block", "row"),
    [
        (
            "headline",
            "bf16, channels_last | 1.22x | contiguous (geometric mean; 1 faster, 1 not decided) |",
        ),
        ("headline", "2 workers | 2.00x | timm |"),
        ("headline", "digits, the same recipe | 1.25 (1.00 to 2.00)x | timm |"),
        ("headline", "| 0.99x (rounds 0.97 to 1.01) | a bare loop"),
        ("models", "| fp32 | 1.04x | 1 faster, 1 slower |"),
        ("models", "| bf16 | 1.22x | 1 faster, 1 not decided |"),
        ("accuracy", "timm, recipe of train.py | 3 of 8 | not reached | 7.0 (6.0 to 8.0) |"),
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


def test_the_picture_is_drawn_with_the_digest_of_its_record(planted):
    pytest.importorskip("matplotlib")
    figures.draw_speeds(PLANTED["models"], planted / "speed.png")
    with Image.open(planted / "speed.png") as image:
        assert image.width > 500 and image.info["record"] == figures.digest("models")
