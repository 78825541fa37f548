"""What may be compared with what; run folders with something wrong get neither a false verdict nor
a traceback.
"""

import math
from dataclasses import asdict, replace

import pytest

from cl_train.config.command_line import check_command_line, group_choices
from cl_train.config.validation import flatten
from cl_train.errors import ConfigError
from cl_train.sweeps.report import compare_folders
from cl_train.sweeps.verdict import compare_pair, compare_runs, too_few_windows
from cl_train.system.run_folder import read_run
from tests.sweeps.run_folders import folder_of, run_of


def apply(change, first, second):
    """Call a function, or set values by place: a file, or a key of config, summary or all records
    of the second side, of its record N ("N.loss"), or of a summary ("first.model", "both.model").
    """
    if callable(change):
        change(first, second)
        return
    places = {"config": [second.config], "summary": [second.summary], "first": [first.summary]}
    places |= {"both": [first.summary, second.summary], "records": second.records}
    places |= {str(number): [record] for number, record in enumerate(second.records)}
    for place, value in change.items():
        name, _, key = place.partition(".")
        if not key:
            setattr(second, name, value)
        for document in places[name] if key else ():
            document[key] = value


def line(text, index=3):
    return lambda first, second: second.records.insert(index, text)


def later(hours, device="cpu"):
    times = {f"{number}.time": 1.7e9 + 1000 + 60 * number + hours * 3600 for number in range(13)}
    return {**times, "both.device": device}


def resumed(name, before, after):
    """Resumed after six windows: a fact in the records before and after."""
    return {f"{number}.{name}": before if number < 6 else after for number in range(13)}


def asked_and_ran(asked, ran):
    return {
        "config.channels_last": asked,
        "summary.channels_last_requested": asked,
        "summary.memory_format": ran,
    }


def lost_pct(first, second, device="cpu"):
    return {"first.lost_pct": first, "summary.lost_pct": second, "both.device": device}


def without(*names):
    return lambda first, second: [second.summary.pop(name) for name in names]


COMPARABLE = [
    {},
    {"config.seed": 1, "summary.seed": 1},
    {"config.log_every": 5},
    {"summary.status": "interrupted"},
    asked_and_ran("auto", "channels_last"),
    resumed("precision", "bf16", "bf16"),
    line('{"kind": "tr', 99),
    line({"kind": "val", "step": 30, "loss": 1.0}),
    *({"12.loss": loss} for loss in (math.nan, None, 1e308)),
    later(1),
    later(-0.27),
    {"first.others_pct": 51.0, "summary.others_pct": 99.0},  # each had a core of its own
    lost_pct(50.0, 54.0, "cuda"),
    lost_pct(4.9, 0.0),
    lost_pct(None, None),
    {"summary.amp": {"skipped_steps": 2}},
]
# A word of the reason, and changes.
NOT_COMPARABLE = [
    # other settings and facts
    ("data.name", {"config.data": {"name": "folder"}}),
    ("turbo", {"config.turbo": True}),
    ("device", {"summary.device": "cuda"}),
    ("device_name", {"summary.device_name": "other"}),
    ("environment.torch", {"summary.environment": {"torch": "2.11.0"}}),
    ("world_size", {"summary.world_size": 2}, resumed("world_size", 2, 1)),
    ("differs", without("precision", "device_name", "environment")),
    ("checkpoint.every_steps", {"config.checkpoint": {"every_steps": 1}}),
    ("profile", {"config.profile": True}),
    # how the run ended, and what changed when it was resumed
    ("failed", {"summary.status": "failed"}),
    ("summary.json", {"summary": None}),
    ("memory_format", resumed("memory_format", "contiguous", "channels_last")),
    ("precision", resumed("precision", "bf16", "fp32")),
    ("device_name", resumed("device_name", "a", ["b"])),
    # both sides ran the same
    ("contiguous", asked_and_ran("auto", "contiguous"), asked_and_ran("true", "contiguous")),
    # records
    ("step", lambda a, b: b.records.extend(dict(entry) for entry in b.records[-3:]), {"5.step": 1}),
    ("step", lambda a, b: setattr(b, "records", [entry for entry in b.records for _ in "ab"])),
    ("cannot be read", line('{"kind": "tr'), line("null")),
    ("windows", lambda a, b: b.records.__delitem__(slice(4, None)), {"records.warmup": True}),
    ("not finite", {"records.loss": math.nan}),
    # times, other processes, and what else it did
    ("apart", later(24)),
    ("at the same time", later(-0.27, "cuda")),
    ("other processes", *(lost_pct(pct, 60.0) for pct in (1.0, 60.0, None))),
    ("other processes", lost_pct(5.0, 1.0), lost_pct(1.0, 60.0, "cuda")),
    ("updates", {"summary.amp": {"skipped_steps": 130}}),
    ("images were skipped", {"summary.skipped_images": 9999}),
    ("resumed with other settings", {"summary.resumed_with": ["batch_size"]}),
]
DAMAGED = [
    ("window", {"records": []}),
    ("metrics.jsonl", {"records": None}, *({"4.images_per_s": x} for x in (math.nan, None, 0))),
    ("summary.json", *({"summary": text} for text in ([1], '{"status": "comp'))),
    ("config.yaml", *({"config": text} for text in (None, "- a list", "a: ["))),
]
CASES = [
    *((change, "faster", "") for change in COMPARABLE),
    *((change, "not_comparable", word) for word, *changes in NOT_COMPARABLE for change in changes),
    *((change, "error", word) for word, *changes in DAMAGED for change in changes),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_crafted_pair(number, tmp_path, tables_only, capsys):
    change, expected, word = CASES[number]
    first, second = folder_of(100.0), folder_of(150.0, channels_last="true")
    apply(change, first, second)
    folders = [first.write(tmp_path / "first"), second.write(tmp_path / "second")]
    for order in (folders, folders[::-1]):
        try:
            [pair] = compare_folders(order).pairs
        except ConfigError as error:
            assert expected == "error", error
            assert len(str(error).splitlines()) == 1 and word in str(error)
            continue
        assert pair.verdict == expected, pair.notes
        assert expected == "faster" or word in pair.notes[0]
        _, how_to_write = capsys.readouterr().out.splitlines()
        assert "out=" in how_to_write
        for found in compare_folders([tmp_path]).pairs:
            # The same by folder and by name.
            assert (found.verdict, found.notes) == (pair.verdict, pair.notes)
        capsys.readouterr()


SGD, ADAMW = {"optim__name": "sgd", "optim__lr": 0.1}, {"optim__name": "adamw", "optim__lr": 1e-3}
CL, S1, S2 = {"channels_last": "true"}, {"seed": 1}, {"seed": 2}
# The machine becomes slower by half: within a pair the ratio is 1.2.
SLOWER = [({}, None, 100.0), (CL, None, 120.0), (CL, None, 60.0), ({}, None, 50.0)]
SEEDS = [({}, 1, 100.0), (CL, 1, 150.0), (CL | S1, 1, 152.0), (S1, 1, 101.0), (CL | S2, 1, 9.0)]


@pytest.mark.parametrize(
    ("by", "runs", "ratio", "count"),
    [
        ("channels_last", SLOWER, 1.2, 2),
        # A1 B1 B2 A2 with B1 failed: A2 and B2 ran next to each other, A1 has no partner.
        ("channels_last", [({}, 1, 90.0), (CL, 2, 150.0), ({}, 2, 100.0)], 1.5, 1),
        # with other learning rates
        ("optim.name", [(ADAMW, 1, 90.0), (ADAMW, 2, 100.0), (SGD, 2, 150.0)], 1.5, 1),
        ("channels_last", SEEDS, 1.5, 2),  # seeds are repeats too, and seed 2 has no partner
    ],
)
def test_repeats_are_paired(by, runs, ratio, count, tmp_path):
    """By number and seed, else in the order in which they ran."""
    read = []
    for number, (changes, repeat, speed) in enumerate(runs):
        run = run_of(tmp_path, speed, started_at=1e9 + 1000 * number, **changes)
        read.append(replace(run, repeat=repeat))
    [pair] = compare_runs(read, by)
    assert pair.interval.n == count
    assert pair.interval.ratio == pytest.approx(ratio, rel=0.01)


def test_what_differs_is_named_once_with_both_values(tmp_path):
    second = run_of(tmp_path, 150.0, channels_last="true", data__image_size=9)
    [pair] = compare_runs([run_of(tmp_path), second])
    named = "data.image_size differs: 224 (contiguous) and 9 (channels_last)"
    assert pair.notes[:1] == [note for note in pair.notes if "differs" in note] == [named]
    assert "image_size" not in pair.held_equal


@pytest.mark.parametrize(
    ("by", "baseline", "candidate", "shown"),
    [
        ("precision", {"precision": "fp32"}, {"precision": "bf16"}, "fp32 bf16"),
        ("batch_size", {"batch_size": 8}, {"batch_size": 128}, "8 128"),
        ("drop_path", {"drop_path": None}, {"drop_path": 0.1}, "null 0.1"),
        ("nproc", {}, {"world_size": 2, "global_batch_size": 64}, "1 2"),  # in the summary
    ],
)
def test_other_keys_can_be_compared(by, baseline, candidate, shown, tmp_path):
    second = folder_of(150.0, **({} if by == "nproc" else candidate))
    second.summary |= candidate if by == "nproc" else {}
    runs = [read_run(second.write(tmp_path / "second")), run_of(tmp_path, **baseline)]
    [pair] = compare_runs(runs, by)
    assert list(pair.sides) == [f"{by}={value}" for value in shown.split()]
    assert pair.verdict == "faster"


def test_optimizers_can_be_compared_by_name(tmp_path):
    """What the files of the group change besides is accepted and noted."""
    configs = [check_command_line([f"optim={choice}"])[0] for choice in group_choices("optim")]
    runs = [replace(run_of(tmp_path), settings=dict(flatten(asdict(cfg)))) for cfg in configs]
    pairs = compare_runs(runs, by="optim.name")
    assert len(pairs) == len(runs) - 1 > 2 and {pair.verdict for pair in pairs} == {"inconclusive"}
    assert "optim.decay_norm_and_bias" in str([pair.notes for pair in pairs])


def test_what_may_have_changed_speed_or_loss_is_noted(tmp_path):
    first, second = run_of(tmp_path), run_of(tmp_path, 150.0, channels_last="true")

    def notes(**changes):
        one = replace(first, summary=first.summary | {"git.commit": "a"})
        pair = compare_pair([one], [replace(second, **changes)])
        assert pair.verdict == "faster"
        return " ".join(pair.notes)

    for of_git in ({"git.commit": "b"}, {"git.commit": "a", "git.dirty": True}):
        assert "different code" in notes(summary=second.summary | of_git)
    assert "before the end: run1" in notes(summary=second.summary | {"status": "interrupted"})
    assert "seed" in notes(settings=second.settings | {"seed": 1})
    assert "used up to 15 % of the CPU" in notes(summary=second.summary | {"others_pct": 15.0})
    unknown = {name: value for name, value in second.summary.items() if name != "lost_pct"}
    assert "other processes took from the runs is unknown" in notes(summary=unknown)
    assert all("one run per side" in note for note in compare_pair([first], [second]).notes)
    compiled = [replace(run, settings=run.settings | {"compile": True}) for run in (first, second)]
    assert compare_pair(compiled[:1], compiled[1:]).notes[0].startswith("compiled: ")


def test_every_run_without_a_partner_is_named(tmp_path):
    lacking = [run_of(tmp_path), run_of(tmp_path, 150.0, turbo=True)]
    [pair] = compare_runs(lacking, by="turbo")
    assert (pair.verdict, pair.notes[0]) == ("not_comparable", "turbo of run0 is unknown")
    given = (("false", 8), ("false", 16), ("true", 32), ("true", 64))
    runs = [run_of(tmp_path, channels_last=value, batch_size=size) for value, size in given]
    for chosen in (runs, runs[1:], runs[:3]):
        pairs = compare_runs(chosen)
        assert {pair.verdict for pair in pairs} == {"not_comparable"}
        named = {run.folder for pair in pairs for run in pair.runs}
        assert named == {run.folder for run in chosen}
    assert compare_runs(runs[:2]) == []


@pytest.mark.parametrize(
    ("images_per_s", "waits_pct", "verdict"),
    [
        (100.0, (80.0, 85.0), "not_comparable"),
        (150.0, (1.0, 30.0), "faster"),  # the loader may only hide more of a difference
        (150.0, (61.0, 12.0), "not_comparable"),  # the baseline read from a cold disk
        (60.0, (12.0, 61.0), "not_comparable"),
        (60.0, (30.0, 30.0), "slower"),
    ],
)
def test_a_verdict_is_not_made_by_waiting_for_data(images_per_s, waits_pct, verdict, tmp_path):
    """`images_per_s`: of the candidate."""
    first, second = run_of(tmp_path), run_of(tmp_path, images_per_s, channels_last="true")
    sides = [
        replace(run, windows=[replace(window, data_wait_pct=pct) for window in run.windows])
        for run, pct in zip((first, second), waits_pct, strict=True)
    ]
    pair = compare_pair(sides[:1], sides[1:])
    assert (pair.bottleneck, pair.verdict) == ("loader", verdict)
    loads = (f"{waits_pct[0]:.0f} % (contiguous)", f"{waits_pct[1]:.0f} % (channels_last)")
    assert all(load in pair.notes[0] for load in loads)


@pytest.mark.parametrize(
    ("windows", "batch_size", "is_disturbed"), [(3, 32, False), (4, 32, True), (4, 64, False)]
)
def test_disturbed_runs_that_would_not_be_comparable_either_way_are_not_repeated(
    windows, batch_size, is_disturbed, tmp_path
):
    runs = [run_of(tmp_path), run_of(tmp_path, channels_last="true", batch_size=batch_size)]
    first, second = (
        replace(run, windows=run.windows[:windows], summary=run.summary | {"lost_pct": 60.0})
        for run in runs
    )
    pair = compare_pair([first], [second])
    assert (pair.verdict, pair.is_disturbed) == ("not_comparable", is_disturbed)


@pytest.mark.parametrize(
    ("steps", "epochs", "max_steps", "advice"),
    [
        (8, 1, None, "use epochs=6"),  # as long as the warm-up, with windows of an epoch
        (40, 1, None, "use epochs=2 or log_every=7"),
        (14, 1, 14, "use max_steps=50 or log_every=1"),
    ],
)
def test_a_run_that_is_too_short_is_told_how_long_it_must_be(
    steps, epochs, max_steps, advice, tmp_path
):
    run = run_of(tmp_path, max_steps=max_steps, warmup_steps=10, log_every=10)
    facts = run.summary | {"steps": steps, "epochs": epochs}
    said = too_few_windows(replace(run, windows=run.windows[:1], summary=facts))
    assert " has 1 window after warm-up" in said and said.endswith(advice)


def test_repeats_of_auto_that_chose_differently_are_not_comparable(tmp_path):
    baseline = [run_of(tmp_path) for _ in range(2)]
    auto = [run_of(tmp_path, 150.0, channels_last="auto") for _ in range(2)]
    auto[0] = replace(auto[0], summary=auto[0].summary | {"memory_format": "channels_last"})
    pair = compare_pair(baseline, auto)
    assert pair.verdict == "not_comparable"
    assert "different memory_format" in pair.notes[0]


def test_equal_runs_and_two_runs_in_either_order_can_be_compared(tmp_path):
    pair = compare_pair([run_of(tmp_path)], [run_of(tmp_path)])
    assert pair.verdict == "inconclusive", "one run per side never shows: no difference"
    assert list(pair.sides) == [f"contiguous ({tmp_path}/run{number})" for number in (0, 1)]
    pair = compare_pair([run_of(tmp_path)] * 5, [run_of(tmp_path, 100.5, channels_last="true")] * 5)
    assert pair.verdict == "no_difference"
    first, second = run_of(tmp_path, model="alexnet"), run_of(tmp_path, 150.0, channels_last="true")
    pair = compare_pair([second], [first])
    assert list(pair.sides) == ["contiguous", "channels_last"]
    assert pair.verdict == "not_comparable" and pair.notes[0].startswith("model ")
    assert compare_runs([first, second]) == [], "without names, runs of two models are no pair"
