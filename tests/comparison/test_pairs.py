"""What may be compared with what."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cl_train.comparison.pairs import compare_pair, compare_runs, compare_two
from cl_train.config.command_line import check_command_line, group_choices
from cl_train.config.validation import flatten, to_mapping
from tests.comparison.run_folders import run_of


def test_a_pair_of_layouts(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, 100.0), run_of(tmp_path, 150.0, channels_last="true")]
    [pair] = compare_runs(runs)
    assert (pair.baseline, pair.candidate, pair.verdict) == ("contiguous", "channels_last", "faster")
    assert pair.interval is not None and pair.interval.ratio == pytest.approx(1.5, rel=0.01)
    assert pair.loss_gap == 0.0
    assert pair.bottleneck == "compute"


def test_repeats_are_paired_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    """The machine becomes slower by half between the pairs: within a pair the ratio is 1.2 throughout."""
    runs = [
        run_of(tmp_path, 100.0, started_at=1e9),
        run_of(tmp_path, 120.0, channels_last="true", started_at=1e9 + 1000),
        run_of(tmp_path, 60.0, channels_last="true", started_at=1e9 + 2000),
        run_of(tmp_path, 50.0, started_at=1e9 + 3000),
    ]
    [pair] = compare_runs(runs)
    assert pair.interval is not None
    assert pair.interval.n == 2
    assert pair.interval.ratio == pytest.approx(1.2, rel=0.01)


def test_repeats_are_paired_by_their_number(tmp_path: Path) -> None:
    """A1 B1 B2 A2 with B1 failed: A2 and B2 ran next to each other, A1 has no partner."""
    runs = [
        replace(run_of(tmp_path, 90.0, started_at=1e9), repeat=1),
        replace(run_of(tmp_path, 150.0, channels_last="true", started_at=1e9 + 3000), repeat=2),
        replace(run_of(tmp_path, 100.0, started_at=1e9 + 4000), repeat=2),
    ]
    [pair] = compare_runs(runs)
    assert pair.interval is not None and pair.interval.n == 1
    assert pair.interval.ratio == pytest.approx(1.5, abs=0.01)


def test_repeats_are_paired_by_their_number_although_the_sides_have_other_learning_rates(tmp_path: Path) -> None:
    sides: dict[str, dict[str, Any]] = {
        "sgd": {"optim__name": "sgd", "optim__lr": 0.1},
        "adamw": {"optim__name": "adamw", "optim__lr": 1e-3},
    }
    table = [("adamw", 1, 90.0), ("adamw", 2, 100.0), ("sgd", 2, 150.0)]
    runs = [
        replace(run_of(tmp_path, speed, started_at=1e9 + 1000 * number, **sides[name]), repeat=repeat)
        for number, (name, repeat, speed) in enumerate(table)
    ]
    [pair] = compare_runs(runs, by="optim.name")
    assert pair.interval is not None and pair.interval.ratio == pytest.approx(1.5, abs=0.01)


def test_seeds_are_repeats_too(tmp_path: Path) -> None:
    """seed=0,1,2 and channels_last: three runs a side, all of them the first repeat."""
    table = [("false", 100.0, 0), ("true", 150.0, 0), ("true", 152.0, 1), ("false", 101.0, 1), ("true", 151.0, 2)]
    runs = [
        replace(run_of(tmp_path, speed, channels_last=layout, seed=seed, started_at=1e9 + 1000 * number), repeat=1)
        for number, (layout, speed, seed) in enumerate(table)
    ]
    [pair] = compare_runs(runs)
    assert pair.interval is not None and pair.interval.n == 2, "seed 2 has no partner"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 64}, ("batch_size", "32", "64")),
        ({"precision": "fp32"}, ("precision", "bf16", "fp32")),
        ({"compile": True}, ("compile", "false", "true")),
        ({"data__image_size": 128}, ("data.image_size", "224", "128")),
        ({"data__workers": 8}, ("data.workers", "2", "8")),
    ],
)
def test_what_differs_is_named_with_both_values(
    tmp_path: Path, change: dict[str, Any], named: tuple[str, str, str]
) -> None:
    [pair] = compare_runs([run_of(tmp_path), run_of(tmp_path, 150.0, channels_last="true", **change)])
    assert pair.verdict == "not_comparable"
    key, first, second = named
    assert pair.notes[0].startswith(f"{key} ") and f" {first} (" in pair.notes[0] and f" {second} (" in pair.notes[0]
    assert sum("differs" in note for note in pair.notes) == 1, "once, by its setting"
    assert key.removeprefix("data.") not in pair.held_equal


def test_other_keys_can_be_compared(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, 100.0, precision="fp32"), run_of(tmp_path, 150.0, precision="bf16")]
    [pair] = compare_runs(runs, by="precision")
    assert (pair.baseline, pair.candidate, pair.verdict) == ("precision=fp32", "precision=bf16", "faster")
    runs = [run_of(tmp_path, 100.0, batch_size=8), run_of(tmp_path, 150.0, batch_size=128)]
    [pair] = compare_runs(runs, by="batch_size")
    assert (pair.baseline, pair.candidate, pair.verdict) == ("batch_size=8", "batch_size=128", "faster")
    changed = {"optim__library": "timm", "optim__decay_norm_and_bias": False}  # by optim=timm
    runs = [run_of(tmp_path, optim__name="lion", **changed)]
    runs.append(run_of(tmp_path, optim__name="sgd", optim__library="torch", optim__decay_norm_and_bias=True))
    [pair] = compare_runs(runs, by="optim.name")
    assert (pair.baseline, pair.candidate, pair.verdict) == ("optim.name=lion", "optim.name=sgd", "inconclusive")
    assert any("optim.decay_norm_and_bias" in note for note in pair.notes), "the note says what else differs"
    runs = [run_of(tmp_path, 100.0, drop_path=None), run_of(tmp_path, 150.0, drop_path=0.1)]
    [pair] = compare_runs(runs, by="drop_path")
    assert (pair.baseline, pair.candidate, pair.verdict) == ("drop_path=null", "drop_path=0.1", "faster")


@pytest.mark.parametrize("group", ["optim", "schedule"])
def test_choices_of_a_group_can_be_compared_by_its_name(group: str, tmp_path: Path) -> None:
    """What the files of the group change is accepted."""
    runs = []
    for choice in group_choices(group):
        [cfg] = check_command_line([f"{group}={choice}"])
        runs.append(replace(run_of(tmp_path), settings=dict(flatten(to_mapping(cfg)))))
    pairs = compare_runs(runs, by=f"{group}.name")
    assert len(pairs) == len(runs) - 1 > 2
    assert {pair.verdict for pair in pairs} == {"inconclusive"}


def test_numbers_of_processes_can_be_compared(tmp_path: Path) -> None:
    """config.yaml of a job has nproc=1, because the launcher passes it to torchrun."""
    one, two = run_of(tmp_path, 100.0), run_of(tmp_path, 150.0)
    settings = two.settings | {"nproc": 2}
    two = replace(two, settings=settings, summary=two.summary | {"world_size": 2, "global_batch_size": 64})
    [pair] = compare_runs([two, one], by="nproc")
    assert (pair.baseline, pair.candidate, pair.verdict) == ("nproc=1", "nproc=2", "faster")


def test_another_seed_leaves_the_speeds_comparable(tmp_path: Path) -> None:
    [pair] = compare_runs([run_of(tmp_path), run_of(tmp_path, 150.0, channels_last="true", seed=1)])
    assert pair.verdict == "faster"
    assert any("seed" in note for note in pair.notes)


def test_what_may_have_changed_the_speed_is_noted(tmp_path: Path) -> None:
    first, second = run_of(tmp_path), run_of(tmp_path, 150.0, channels_last="true")
    for git, word in (({"git.commit": "b" * 40}, "commits"), ({"git.commit": "a" * 40, "git.dirty": True}, "code")):
        one = replace(first, summary=first.summary | {"git.commit": "a" * 40})
        pair = compare_pair([one], [replace(second, summary=second.summary | git)])
        assert pair.verdict == "faster" and any(word in note for note in pair.notes)
    later = replace(second, times=first.times)
    assert any("at the same time" in note for note in compare_pair([first], [later]).notes)
    assert all("one run per side" in note for note in compare_pair([first], [second]).notes)


def test_a_loader_bound_pair_is_never_no_difference(tmp_path: Path) -> None:
    first, second = run_of(tmp_path), run_of(tmp_path, channels_last="true")
    pair = compare_pair([replace(first, data_wait_pct=80.0)], [replace(second, data_wait_pct=85.0)])
    assert (pair.bottleneck, pair.verdict) == ("loader", "not_comparable")
    assert "80 % (contiguous)" in pair.notes[0] and "85 % (channels_last)" in pair.notes[0]
    second = replace(run_of(tmp_path, 150.0, channels_last="true"), data_wait_pct=30.0)
    pair = compare_pair([first], [second])
    assert (pair.bottleneck, pair.verdict) == ("loader", "faster"), "the loader may only hide more of a difference"


def test_equal_runs_can_be_compared(tmp_path: Path) -> None:
    pair = compare_two(run_of(tmp_path), run_of(tmp_path), "channels_last")
    assert pair.verdict == "inconclusive", "one run per side cannot show that there is no difference"
    assert (pair.baseline, pair.candidate) == ("contiguous (run0)", "contiguous (run1)")
    pair = compare_pair([run_of(tmp_path)] * 5, [run_of(tmp_path, 100.5, channels_last="true")] * 5)
    assert pair.verdict == "no_difference"


def test_two_named_runs_are_a_pair_in_either_order(tmp_path: Path) -> None:
    first, second = run_of(tmp_path, model="alexnet"), run_of(tmp_path, 150.0, channels_last="true")
    for pair in (compare_two(first, second, "channels_last"), compare_two(second, first, "channels_last")):
        assert (pair.baseline, pair.verdict) == ("contiguous", "not_comparable")
        assert pair.notes[0].startswith("model ")
    assert compare_runs([first, second]) == [], "without names, runs of two models are no pair"
