"""Statistics with known answers, and what may be compared with what."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from cl_train.comparison import pairs as compare
from cl_train.comparison.pairs import compare_pair, compare_runs
from cl_train.comparison.report import Comparison, FailedJob, as_markdown, draw_chart, verdict_sentence, write_report
from cl_train.comparison.run_records import Run, read_run
from cl_train.comparison.statistics import Interval, interval_of_rounds, interval_of_runs, verdict_of
from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import to_mapping, to_yaml


def wandering(rng: random.Random, count: int, noise: float, phi: float = 0.7) -> list[float]:
    """Log speeds whose neighbours are alike: first-order autoregression with standard deviation `noise`."""
    values = [rng.gauss(0, noise)]
    for _ in range(count - 1):
        values.append(phi * values[-1] + rng.gauss(0, noise * math.sqrt(1 - phi * phi)))
    return values


def simulated_runs(
    rng: random.Random, effect: float, repeats: int, noise: float, between: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Windows of A B B A ... runs under drift; `between` processes, `effect` on log speed of B."""
    sides: dict[str, list[list[float]]] = {"A": [], "B": []}
    drift = 0.0
    for repeat in range(repeats):
        for side in "AB" if repeat % 2 == 0 else "BA":
            offset = rng.gauss(0, between) + (effect if side == "B" else 0.0)
            run = []
            for value in wandering(rng, 30, noise):
                drift += rng.gauss(0, 0.001)
                run.append(math.exp(6 + value + drift + offset))
            sides[side].append(run)
    return sides["A"], sides["B"]


def run_of(speed: float = 100.0, **changes: object) -> Run:
    settings = {
        "channels_last": "false",
        "model": "resnet18",
        "precision": "auto",
        "batch_size": 32,
        "compile": False,
        "seed": 0,
        "data.name": "sample",
        "data.workers": 2,
        "data.image_size": 224,
    }
    summary = {
        "status": "completed",
        "precision": "bf16",
        "device": "cpu",
        "device_name": "a processor",
        "world_size": 1,
        "environment": {"torch": "2.15.0"},
        "peak_memory_gib": 1.0,
    }
    settings |= {key: value for key, value in changes.items() if key in settings}
    summary |= {key: value for key, value in changes.items() if key in summary and key != "precision"}
    settings |= {key.replace("__", "."): value for key, value in changes.items() if "__" in key}
    summary["memory_format"] = "channels_last" if settings["channels_last"] == "true" else "contiguous"
    summary["precision"] = "bf16" if settings["precision"] == "auto" else settings["precision"]
    wait = float(str(changes.get("wait", 1.0)))
    windows = [speed * (1 + 0.002 * (-1) ** index) for index in range(12)]
    started_at = float(str(changes.get("started_at", 0.0)))
    return Run(Path("run"), settings, summary, windows, wait, {10: 2.0, 20: 1.5}, started_at)


def test_interval_of_rounds_is_the_t_interval() -> None:
    interval = interval_of_rounds([0.1, 0.2, 0.3, 0.4])
    half = 3.182 * math.sqrt(1 / 60) / 2  # stdev of the four is sqrt(1/60)
    assert interval.ratio == pytest.approx(math.exp(0.25))
    assert interval.low == pytest.approx(math.exp(0.25 - half))
    assert interval.high == pytest.approx(math.exp(0.25 + half))
    assert interval.n == 4


def test_one_round_says_nothing() -> None:
    interval = interval_of_rounds([0.3])
    assert (interval.low, interval.high) == (0.0, math.inf)
    assert verdict_of(interval) == "no_difference"


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(1.05, 1.02, 1.08, 3), "faster"),
        (Interval(0.95, 0.92, 0.98, 3), "slower"),
        (Interval(1.05, 0.99, 1.12, 3), "no_difference"),
        (Interval(1.005, 1.001, 1.009, 9), "no_difference"),  # beyond noise, but too small to matter
    ],
)
def test_verdicts(interval: Interval, verdict: str) -> None:
    assert verdict_of(interval) == verdict


def test_a_constant_ratio_is_found_exactly() -> None:
    baseline = [[100.0] * 8] * 3
    interval = interval_of_runs(baseline, [[120.0] * 8] * 3)
    assert interval.ratio == pytest.approx(1.2)
    assert interval.low > 1.15, "no noise but the process spread that is always allowed for"


def test_one_repeat_is_wider_than_three() -> None:
    rng = random.Random(0)
    one = interval_of_runs(*simulated_runs(rng, 0.0, 1, 0.01, 0.01))
    three = interval_of_runs(*simulated_runs(rng, 0.0, 3, 0.01, 0.01))
    assert one.width > 1.3 * three.width
    assert one.width > 0.06, "two runs on a machine that drifts cannot tell less than a few percent"


def test_windows_that_wander_widen_the_interval() -> None:
    steady = [[100.0, 101.0] * 20]
    wanders = [[100.0] * 10 + [101.0] * 10 + [102.0] * 10 + [103.0] * 10]
    assert interval_of_runs(wanders, wanders).width > 1.3 * interval_of_runs(steady, steady).width


def test_equal_sides_are_called_equal_and_planted_differences_are_found() -> None:
    """Rates over simulated sweeps of five repeats, with drift, autocorrelated windows and 1 % between processes."""
    rng = random.Random(1)

    def verdicts(effect: float, trials: int) -> list[str]:
        return [verdict_of(interval_of_runs(*simulated_runs(rng, effect, 5, 0.01, 0.01))) for _ in range(trials)]

    assert sum(verdict != "no_difference" for verdict in verdicts(0.0, 200)) <= 20
    assert verdicts(math.log(0.97), 100).count("slower") >= 80
    assert verdicts(math.log(0.90), 100).count("slower") == 100


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 windows"):
        interval_of_runs([[1.0] * 3], [[1.0] * 3])
    short = replace(run_of(), images_per_s=[100.0])
    pair = compare_pair([short], [run_of(channels_last="true")])
    assert pair.verdict == "not_comparable"
    assert "log_every" in pair.notes[0]


def test_a_pair_of_layouts() -> None:
    runs = [run_of(100.0), run_of(150.0, channels_last="true")]
    [pair] = compare_runs(runs)
    assert (pair.baseline, pair.candidate, pair.verdict) == ("contiguous", "channels_last", "faster")
    assert pair.interval is not None and pair.interval.ratio == pytest.approx(1.5, rel=0.01)
    assert pair.loss_gap == 0.0
    assert pair.bottleneck == "compute"


def test_repeats_are_paired_in_the_order_in_which_they_ran() -> None:
    """The machine slows down by half between the pairs: within a pair the ratio is 1.2 throughout."""
    runs = [
        run_of(100.0, started_at=0),
        run_of(120.0, channels_last="true", started_at=1),
        run_of(60.0, channels_last="true", started_at=2),
        run_of(50.0, started_at=3),
    ]
    [pair] = compare_runs(runs)
    assert pair.interval is not None
    assert pair.interval.n == 2
    assert pair.interval.ratio == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 64}, "batch_size differs: 32 (contiguous) and 64 (channels_last)"),
        ({"precision": "fp32"}, "precision differs: bf16 (contiguous) and fp32 (channels_last)"),
        ({"compile": True}, "compile differs: false (contiguous) and true (channels_last)"),
        ({"data__image_size": 128}, "data.image_size differs: 224 (contiguous) and 128 (channels_last)"),
        ({"data__workers": 8}, "data.workers differs: 2 (contiguous) and 8 (channels_last)"),
        ({"environment": {"torch": "2.11.0"}}, "environment.torch differs: 2.15.0 (contiguous) and 2.11.0"),
        ({"device_name": "another"}, "device_name differs: a processor (contiguous) and another (channels_last)"),
    ],
)
def test_what_differs_is_named_with_both_values(change: dict[str, object], named: str) -> None:
    [pair] = compare_runs([run_of(), run_of(150.0, channels_last="true", **change)])
    assert pair.verdict == "not_comparable"
    assert any(note.startswith(named) for note in pair.notes), pair.notes
    assert not pair.held_equal.keys() & {next(iter(change)).removeprefix("data__")}, "what differs is not held equal"


def test_precision_can_be_what_is_compared() -> None:
    runs = [run_of(100.0, precision="fp32"), run_of(150.0, precision="bf16")]
    [pair] = compare_runs(runs, by="precision")
    assert (pair.baseline, pair.candidate, pair.verdict) == ("precision=fp32", "precision=bf16", "faster")


def test_another_seed_or_learning_rate_leaves_the_speeds_comparable() -> None:
    [pair] = compare_runs([run_of(), run_of(150.0, channels_last="true", seed=1)], by="channels_last")
    assert pair.verdict == "faster"
    assert any("seed" in note for note in pair.notes)


def test_a_loader_bound_pair_says_so_first_and_is_never_no_difference() -> None:
    [pair] = compare_runs([run_of(wait=80.0), run_of(100.0, channels_last="true", wait=85.0)])
    assert pair.bottleneck == "loader"
    assert pair.verdict == "not_comparable"
    assert pair.notes[0].startswith("loader-bound: the step waited for its batch 80 % (contiguous) and 85 %")
    [pair] = compare_runs([run_of(wait=2.0), run_of(150.0, channels_last="true", wait=30.0)])
    assert pair.verdict == "faster", "what is beyond noise stays so; only more of it may be hidden"
    assert "loader-bound" in verdict_sentence(Comparison([pair], [], []))


def test_a_busy_machine_makes_a_cpu_pair_not_comparable() -> None:
    runs = [run_of(), replace(run_of(150.0, channels_last="true"), others_pct=60.0)]
    [pair] = compare_runs(runs)
    assert pair.verdict == "not_comparable"
    assert "other processes took up to 60 % of the cores" in pair.notes[0]


def test_a_parity_failure_makes_a_pair_not_comparable() -> None:
    [pair] = compare_runs(
        [run_of(), run_of(150.0, channels_last="true")], parity_failures={"resnet18": "layer1 differs"}
    )
    assert pair.verdict == "not_comparable"
    assert "layer1 differs" in pair.notes


def test_equal_runs_can_be_compared() -> None:
    pair = compare_pair([run_of()], [run_of()])
    assert pair.verdict == "no_difference"
    assert (pair.baseline, pair.candidate) == ("contiguous A", "contiguous B")
    assert "both sides have the same layout: what differs is noise" in pair.notes


def test_a_run_folder_is_read_back(tmp_path: Path) -> None:
    write_run(tmp_path, [50.0, 100.0, 102.0])
    run = read_run(tmp_path)
    assert run.images_per_s == [100.0, 102.0], "the warm-up window is left out"
    assert run.losses == {1: 3.0, 2: 3.0, 3: 3.0}
    assert run.settings["data.image_size"] == Config().data.image_size
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # as a killed process leaves it
    assert len(read_run(tmp_path).losses) == 3


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run folder: no metrics.jsonl"):
        read_run(tmp_path)


def test_a_folder_of_summary_and_metrics_alone_will_do(tmp_path: Path) -> None:
    """No config.yaml, fields missing, an environment of null, a loss of NaN: unknown, not a crash."""
    for name, layout, speed in (("a", "false", 100), ("b", "true", 150)):
        (tmp_path / name).mkdir()
        summary = {"status": "completed", "model": "resnet18", "precision": "bf16", "global_batch_size": 32}
        summary |= {"channels_last_requested": layout, "environment": None, "data_wait_pct": 40.0}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        lines = [{"step": step, "loss": math.nan, "images_per_s": speed + step % 2} for step in range(12)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    runs = [read_run(tmp_path / name) for name in "ab"]
    [pair] = compare_runs(runs)
    assert (pair.baseline, pair.candidate, pair.verdict, pair.bottleneck) == (
        *("contiguous", "channels_last"),
        "faster",
        "loader",
    )
    assert pair.loss_gap is None
    runs[1].summary["global_batch_size"] = 64
    [pair] = compare_runs(runs)
    assert pair.verdict == "not_comparable"
    assert any("global_batch_size differs: 32 (contiguous) and 64" in note for note in pair.notes)


def test_a_difference_is_named_by_its_setting_alone() -> None:
    pair = compare_pair([run_of()], [run_of(batch_size=64)])
    assert [note for note in pair.notes if "differs:" in note] == [
        "batch_size differs: 32 (contiguous A) and 64 (contiguous B)"
    ]


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00"])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, [50.0, 100.0])
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_run(tmp_path)


def test_repeats_are_paired_by_their_number() -> None:
    """A1 B1 B2 A2 with B1 failed: A2 and B2 ran beside each other, A1 has no partner."""
    runs = [
        replace(run_of(90.0), repeat=1, started_at=1.0),
        replace(run_of(150.0, channels_last="true"), repeat=2, started_at=3.0),
        replace(run_of(100.0), repeat=2, started_at=4.0),
    ]
    [pair] = compare_runs(runs)
    assert pair.interval is not None and pair.interval.n == 1
    assert pair.interval.ratio == pytest.approx(1.5, abs=0.01)


def test_seeds_are_repeats_too() -> None:
    """seed=0,1,2 beside channels_last: three runs a side, all of them the first repeat."""
    runs = [
        replace(run_of(speed, channels_last=layout, seed=seed), repeat=1, started_at=float(number))
        for number, (layout, speed, seed) in enumerate(
            [("false", 100.0, 0), ("true", 150.0, 0), ("true", 152.0, 1), ("false", 101.0, 1), ("true", 151.0, 2)]
        )
    ]
    [pair] = compare_runs(runs)
    assert pair.interval is not None and pair.interval.n == 2, "seed 2 has no partner"


def write_run(folder: Path, speeds: list[float]) -> None:
    (folder / "config.yaml").write_text(to_yaml(Config()))
    records = [
        {"kind": "train", "step": step, "loss": 3.0, "images_per_s": speed, "data_wait_pct": 1.0, "warmup": step == 1}
        for step, speed in enumerate(speeds, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**record, "time": 1.0}) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "precision": "bf16", "device": "cpu"}))


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison() -> Comparison:
    runs = [
        run_of(100.0),
        run_of(150.0, channels_last="true"),
        run_of(100.0, model="vit_b_16"),
        run_of(90.0, model="vit_b_16", channels_last="true"),
        run_of(100.0, model="alexnet"),
        run_of(100.0, model="alexnet", channels_last="true", batch_size=64),
    ]
    return Comparison(compare_runs(runs), [FailedJob(3, "model=vgg11", "killed by SIGKILL")], [])


def test_the_report_has_the_agreed_fields(comparison: Comparison, tmp_path: Path) -> None:
    sentence = write_report(comparison, tmp_path)
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["schema_version"] == 1
    first = document["pairs"][0]
    assert first["model"] == "resnet18"
    assert first["precision"] == "bf16"
    assert (first["baseline"], first["candidate"], first["speed"]) == ("contiguous", "channels_last", "end_to_end")
    assert (first["baseline_images_per_s"], first["candidate_images_per_s"]) == (100.0, 150.0)
    assert first["ratio"] == pytest.approx(1.5, rel=0.01)
    assert first["ci95"][0] < first["ratio"] < first["ci95"][1]
    assert (first["n"], first["verdict"], first["loss_gap"], first["bottleneck"]) == (1, "faster", 0.0, "compute")
    assert document["failed"] == [{"job": 3, "overrides": "model=vgg11", "why": "killed by SIGKILL"}]
    lines = (tmp_path / "comparison.csv").read_text().splitlines()
    assert len(lines) == 4
    assert "ci95_low" in lines[0] and "ci95_high" in lines[0]
    assert sentence == (
        "channels_last against contiguous, 3 pairs: faster in 1 (resnet18 1.50x); slower in 1 (vit_b_16 0.90x); "
        "not comparable in 1 (alexnet). 1 job failed."
    )


def test_the_markdown_page(comparison: Comparison) -> None:
    text = as_markdown(comparison)
    assert "**faster**" in text and "**slower**" in text and "**not comparable**" in text
    assert "batch_size differs: 32 (contiguous) and 64 (channels_last)" in text
    assert "| 3 | model=vgg11 | killed by SIGKILL |" in text
    assert "Equal for all: precision bf16" in text


def test_the_chart_has_a_coloured_dot_per_comparable_pair(comparison: Comparison) -> None:
    image = draw_chart(comparison.pairs)
    colours = {colour for _, colour in image.getcolors(maxcolors=1_000_000) or []}
    assert (0, 114, 178) in colours and (213, 94, 0) in colours
    assert draw_chart([]).size[0] == image.size[0]


def test_nothing_to_compare() -> None:
    assert verdict_sentence(Comparison([], [], [])) == "Nothing to compare: no two runs differ in the layout alone."


def test_settings_of_a_real_config_are_known_to_the_comparison() -> None:
    """A key that is renamed in config.py must be renamed in the lists of compare.py too."""
    known = set()

    def collect(values: dict[str, object], prefix: str = "") -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                collect(value, f"{prefix}{key}.")
            known.add(prefix + key)

    collect(to_mapping(Config()))
    for key in (*compare._OTHER_TRAINING, *compare._BOOKKEEPING):
        assert key in known, key
    for group in (*compare._OTHER_TRAINING_GROUPS, *compare._BOOKKEEPING_GROUPS):
        assert group.rstrip(".") in known, group


def test_pairs_that_hold_different_things_equal_have_one_table(tmp_path: Path) -> None:
    other_batch = compare_pair([run_of()], [run_of(channels_last="true", batch_size=64)])
    other_precision = compare_pair([run_of()], [run_of(channels_last="true", precision="fp32")])
    write_report(Comparison([other_batch, other_precision], [], []), tmp_path)
    header, *rows = (tmp_path / "comparison.csv").read_text().splitlines()
    assert {"batch_size", "precision"} <= set(header.split(",")) and len(rows) == 2


def test_failed_runs_of_a_folder_are_listed(tmp_path: Path) -> None:
    from cl_train.commands.compare import runs_inside

    for name in ("a", "b", "broken", "empty"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, [50.0, 100.0, 101.0, 99.0, 100.0])
    (tmp_path / "broken" / "summary.json").write_text('{"status": "failed"}')
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    runs, failed = runs_inside(tmp_path)
    assert [run.folder.name for run in runs] == ["a", "b"]
    assert [job.overrides for job in failed] == ["broken", "empty"]
