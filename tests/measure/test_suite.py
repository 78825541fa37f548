"""The benchmark of many combinations, the zoo and the loaders."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from benchmarks import peers
from cl_train.commands import benchmark, loader_benchmark
from cl_train.commands.zoo import main
from cl_train.config.command_line import CommandLine, compose
from cl_train.config.schema import LAYOUT_CHOICES, BenchmarkSettings, ZooSettings
from cl_train.errors import ConfigError
from cl_train.measure import alternate, parity_gate, suite, zoo
from cl_train.measure.answer import do_text
from cl_train.measure.auto import choose_memory_format
from cl_train.measure.parity_gate import Parity
from cl_train.measure.suite import run_suite
from cl_train.measure.zoo import add_row, open_table, verdict, zoo_row
from tests import networks
from tests.data.image_folders import write_folder
from tests.measure.conftest import planted_comparison
from tests.processes import LIMIT_S

SMALL, DROPOUT = "tests.networks:small", "tests.networks:dropout"
COPYING, DOUBLED = "tests.networks:copying", "tests.networks:doubled"
PERMUTING, CONV = "tests.networks:permuting", "conversion=conv"
QUICK = {"batch_size": [2], "image_size": 32, "device": "cpu", "precision": ["fp32"]}


def settings(**changes):
    given = QUICK | {"model": [SMALL], "time_limit_s": 0.0, "target_ci": 5.0, "parity": "false"}
    return BenchmarkSettings(**(given | changes))


def test_a_video_model_has_speeds_pairs_parity_and_an_audit(capsys):
    video = {"model": ["tests.networks:video"], "frames": 6, "image_size": 12}
    document = run_suite(settings(**video, parity="true", mode=["train", "infer"]))
    for mode, result in zip(("train", "infer"), document["results"], strict=True):
        assert (result["mode"], result["frames"]) == (mode, 6)
        assert result["parity"]["channels_last"]["passed"] is True
        assert [speed["layout"] for speed in result["speeds"]] == ["contiguous", "channels_last"]
        assert result["pairs"][0]["ratio"] > 0
    assert document["complete"] is True and json.dumps(document, allow_nan=False)
    assert "images/s" in capsys.readouterr().out
    entry = zoo_row(*video["model"], replace(ZOO, frames=6, image_size=12))
    assert entry["parity"]["passed"] is True and entry["converted"] == 2
    # instance norm and the pooling of three dimensions return contiguous
    assert entry["audit"]["lost_forward"] and json.dumps(entry)


def test_a_parity_failure_is_not_comparable_and_a_failure_leaves_the_others(monkeypatch):
    failed = Parity(False, "features.0 (Conv2d)")
    monkeypatch.setattr(suite, "parity_before_use", lambda *args, **kwargs: failed)
    names = ["tests.networks:raising", SMALL]
    first, second = run_suite(settings(model=names, parity="true"))["results"]
    assert "planted" in first["error"] and first["pairs"] == []
    assert second["pairs"][0]["verdict"] == "not_comparable"
    assert "features.0 (Conv2d)" in second["text"] and "not comparable" in second["text"]


def test_each_combination_has_its_time_and_an_undecided_one_its_command(monkeypatch, capsys):
    limits, ratios = [], iter([[1.5] * 4, [1.2, 0.9] * 4])

    def slow_parity(*_):
        Slow.now_s += 40.0
        return Parity(True)

    def planted(variants, workload, stop):
        limits.append((stop.target_ci, stop.time_limit_s))
        return planted_comparison(next(ratios))

    monkeypatch.setattr(Slow, "now_s", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: Slow.now_s)
    monkeypatch.setattr(suite, "parity_before_use", slow_parity)
    monkeypatch.setattr(suite, "benchmark_in_time", planted)
    given = settings(model=[SMALL, DROPOUT], time_limit_s=60.0, parity="auto")
    document, text = benchmark.measure(given)
    verdicts = [one["pairs"][0]["verdict"] for one in document["results"]]
    assert verdicts == ["faster", "inconclusive"] and text.endswith("1 of 2 are decided")
    assert limits == [(5.0, 30.0)] * 2, "half of the time at least"
    command = "decide it: OMP_NUM_THREADS=1 cl-train benchmark model=tests.networks:dropout"
    printed = capsys.readouterr().out
    assert command in printed and printed.count("decide it: ") == 1
    assert printed.count("  parity is compared after 40 s, speed follows\n") == 2


def test_the_fastest_of_several_settings_is_named_if_all_compute_the_same(monkeypatch):
    def planted(variants, workload, stop):
        first, last = (done := planted_comparison([1.5] * 4)).speeds
        name = workload.precision.name
        last = replace(last, images_per_s={"bf16": 115.8, "fp32": 177.0}[name])
        return replace(done, speeds=(first, last), precision=name)

    monkeypatch.setattr(suite, "benchmark_in_time", planted)
    of_both = settings(model=[SMALL], precision=["fp32", "bf16"])
    document, text = benchmark.measure(of_both)
    assert text.endswith(f"fastest: {SMALL} precision=fp32 channels_last, 177.0 images/s")
    [fastest] = document["fastest"]
    assert (fastest["precision"], fastest["layout"]) == ("fp32", "channels_last")
    assert f"{SMALL} precision=bf16: channels_last faster (1.50x)" in text
    monkeypatch.setattr(suite, "parity_before_use", lambda *_: Parity(False, "planted"))
    document, text = benchmark.measure(replace(of_both, parity="true"))
    assert document["fastest"] == [] and "fastest" not in text


class Slow(nn.Conv2d):
    """Takes `image_s` of the planted clock for each image, and no time else."""

    now_s = image_s = 0.0

    def forward(self, images):
        if not images.is_meta:  # of shapes alone
            Slow.now_s += self.image_s * len(images)
        return super().forward(images)


def slow(num_classes):
    return nn.Sequential(Slow(3, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("images", "image_s", "timed", "rounds", "end_s", "to_decide"),
    [
        (32, 1 / 128, 32, 8, 30, None),
        (32, 0.375, 8, 2, 70, None),
        (8, 0.75, 8, 1, 70, "batch_size=8 data.image_size=8 .*time_limit_s=240"),
        (8, 64.0, 8, 0, 3400, "batch_size=1 data.image_size=8 .*time_limit_s=3600"),
    ],
)
def test_the_time_limit_holds_for_slow_steps(
    images, image_s, timed, rounds, end_s, to_decide, monkeypatch, capsys
):
    """Fewer images, then fewer rounds; what is left over is parity, once, and a step per side."""
    monkeypatch.setattr(Slow, "now_s", 0.0)
    monkeypatch.setattr(Slow, "image_s", image_s)
    monkeypatch.setattr(time, "perf_counter", lambda: Slow.now_s)
    monkeypatch.setattr(alternate, "thread_times", dict)
    changes = {"model": [f"{__name__}:slow"], "batch_size": [images], "image_size": 8}
    changes |= {"time_limit_s": 60.0, "parity": "true", "target_ci": 0.02}
    [result] = run_suite(settings(**changes))["results"]
    assert (result["batch_size"], result["rounds"]) == (timed, rounds)
    assert result["speeds"][0]["step_ms"] == pytest.approx(1000 * image_s * timed)
    assert Slow.now_s <= end_s, Slow.now_s
    said = re.findall("the first step took (.+) s: about (.+) s to go", capsys.readouterr().out)
    step_s = image_s * timed
    assert [float(step) for step, _ in said] == ([round(step_s, 1)] if step_s >= 1 else [])
    assert all(float(rest) <= 60 or step_s > 30 for _, rest in said)
    assert ("all layouts used 8" in result["text"]) is (timed < images)
    assert {0: "no round of", 1: "only one round"}.get(rounds, "images/s") in result["text"]
    assert (result["pairs"][0]["verdict"] == "inconclusive") is bool(to_decide)
    assert re.search(to_decide or "None", str(result["to_decide"]))


def test_one_model_ends_with_one_answer_in_four_lines(monkeypatch, capsys):
    monkeypatch.setattr(suite, "benchmark_in_time", lambda *a, **k: planted_comparison([1.5] * 4))
    document, text = benchmark.measure(settings(model=[COPYING], parity="auto"))
    [result] = document["results"]
    answer = result["answer"]
    printed = capsys.readouterr().out
    assert text == "" and printed.rstrip().splitlines()[-4:] == [
        f"  {name + ':':<9}{line}" for name, line in answer.items()
    ]
    assert list(answer) == ["right", "faster", "because", "do"]
    assert answer["right"] == "both layouts compute the same"
    assert answer["faster"].startswith("channels_last runs at 1.500x [1.500, 1.500] of")
    assert f"{COPYING} loses channels_last in 1 module" in answer["because"]
    assert "clone (forward) at tests/networks.py:" in answer["because"]
    trained = "channels_last=true precision=fp32 data.image_size=32 batch_size=4 device=cpu"
    assert answer["do"].startswith(f"cl-train train model={COPYING} {trained}; add your data=")
    assert "; to gain more, mend tests/networks.py:" in answer["do"]
    assert result["audit"][COPYING]["lost_forward"] == {"clone": 1}

    monkeypatch.setattr(suite, "benchmark_in_time", lambda *a, **k: planted_comparison([0.5] * 4))
    [result] = run_suite(settings())["results"]
    command = f"what takes longer: cl-train audit model={SMALL} precision=fp32 batch_size=2"
    assert command in result["answer"]["because"] and result["answer"]["because"].endswith("true")

    wrong = Parity(False, "convolution in features.0")
    monkeypatch.setattr(suite, "parity_before_use", lambda *args: wrong)
    answer = run_suite(settings(parity="auto"))["results"][0]["answer"]
    assert answer["right"] == "channels_last: convolution in features.0"
    assert answer["do"].startswith(f"cl-train compare parity=true model={SMALL}")

    monkeypatch.setattr(suite, "audited_step", Mock(side_effect=ValueError("planted")))
    [result] = run_suite(settings())["results"]
    assert "planted" in result["answer"]["because"] and result["speeds"]


@pytest.mark.parametrize(
    ("ratio", "changes", "trained"),
    [
        (1.5, {}, f"{SMALL} channels_last=true"),
        (0.5, {}, f"{SMALL} channels_last=false"),
        (0.5, {"layouts": ["channels_last", "contiguous"]}, f"{SMALL} channels_last=true"),
        (1.5, {"layouts": [None, "channels_last_conv"]}, f"{SMALL} channels_last=true {CONV}"),
        (1.5, {"compare_by": "model"}, f"{DROPOUT} channels_last=true"),
        (0.5, {"compare_by": "model", "channels_last": False}, f"{SMALL} channels_last=false"),
    ],
)
def test_the_answer_trains_what_was_timed(ratio, changes, trained):
    of_models = [SMALL, DROPOUT] if "compare_by" in changes else []
    sides = of_models or changes.get("layouts", LAYOUT_CHOICES[:2])
    done = planted_comparison([ratio] * 4)
    named = zip(done.speeds, sides, strict=True)
    done = replace(done, speeds=tuple(replace(one, layout=side) for one, side in named))
    words = {"model": ",".join(of_models or [SMALL]), **changes, "optimizer": "adamw"}
    words |= {"precision": "bf16", "data.image_size": 64, "device": "cpu", "compile": True}
    command = f"cl-train train model={trained} precision=bf16 data.image_size=64 batch_size=4"
    command += " compile=true device=cpu optim=adamw"
    text = do_text(done, words, {}, [], None)
    assert text == f"{command}; add your data=... (config=RUN has it)"
    of_run = do_text(done, words | {"config": "RUN"}, {}, [], None)
    assert of_run == command.replace(" model=", " config=RUN model=")
    [composed] = compose(CommandLine.parse(command.split()[2:]))
    assert (composed.cfg.batch_size, composed.cfg.optim.name) == (4, "adamw")


def test_two_models_are_timed_in_turns_and_told_whether_they_compute_the_same(monkeypatch):
    before_after = {"compare_by": "model", "parity": "auto"}
    [result] = run_suite(settings(model=[COPYING, SMALL], **before_after))["results"]
    assert [speed["layout"] for speed in result["speeds"]] == [COPYING, SMALL]
    [pair] = result["pairs"]
    assert (pair["baseline"], pair["candidate"]) == (COPYING, SMALL)
    assert set(result["parity"]) == set(result["audit"]) == {COPYING, SMALL}
    assert result["by_itself_pct"] is None, "no side is contiguous"
    assert result["answer"]["right"].endswith("both models compute the same")
    assert f"{SMALL}: no operator loses channels_last" in result["answer"]["because"]

    for other, said in ((DOUBLED, "something else"), (DROPOUT, "differ in name or shape")):
        [result] = run_suite(settings(model=[SMALL, other], **before_after))["results"]
        assert said in result["answer"]["right"]
    parities = iter([Parity(True), Parity(False, "planted")])
    monkeypatch.setattr(suite, "parity_before_use", lambda *args: next(parities))
    [result] = run_suite(settings(model=[SMALL, COPYING], **before_after))["results"]
    assert result["answer"]["do"].startswith(f"cl-train compare parity=true model={COPYING} ")
    with pytest.raises(ConfigError, match="two or more models"):
        run_suite(settings(**before_after))


def test_a_contiguous_side_that_is_channels_last_by_itself_is_named(monkeypatch):
    permuting = settings(model=[PERMUTING], layouts=["contiguous", "channels_last"])
    [result] = run_suite(permuting)["results"]
    assert result["by_itself_pct"] == pytest.approx(100.0)
    said = "the contiguous side computes 100 % of its images in channels_last"
    assert said in result["text"] and "by itself" in result["answer"]["faster"]
    [result] = run_suite(settings())["results"]
    assert result["by_itself_pct"] == 0.0 and "by itself" not in result["text"]
    choice = choose_memory_format(
        networks.permuting(10), batch_size=2, image_size=32, device="cpu", time_limit_s=0.0
    )
    assert said in choice.reason


@pytest.mark.parametrize(
    ("signum", "stop"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_benchmark_that_is_stopped_leaves_what_it_has_measured(
    signum, stop, monkeypatch, tmp_path, capsys
):
    outcomes = iter([planted_comparison([2.0] * 4)])
    measured = lambda *_, **__: next(outcomes, None) or signal.raise_signal(signum)  # noqa: E731
    monkeypatch.setattr(suite, "benchmark_in_time", measured)
    out, before = tmp_path / "new" / "benchmark.json", signal.getsignal(signal.SIGTERM)
    words = ["batch_size=2", "data.image_size=32", "device=cpu", "precision=fp32", "parity=false"]
    # A background job has no handler of Ctrl-C.
    of_caller = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(stop):
        benchmark.main([f"model={SMALL},{DROPOUT}", *words, f"out={out}"])
    signal.signal(signal.SIGINT, of_caller)
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().out.endswith(f"\nstopped: 1 of 2 are measured, in {out}\n")
    document = json.loads(out.read_text())
    assert document["complete"] is False
    assert [(one["model"], one["pairs"][0]["ratio"]) for one in document["results"]] == [(SMALL, 2)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(stop):
        benchmark.main([f"model={SMALL}", *words, f"out={tmp_path}/none.json"])
    signal.signal(signal.SIGINT, of_caller)
    said = f"\nstopped: 0 of 1 are measured; {tmp_path}/none.json is not written\n"
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ["resnt18"]},
        {"model": ["my_net.build"]},
        {"layouts": ["contiguous"]},
        {"model": []},
        {"mode": []},
    ],
)
def test_wrong_settings_are_refused(changes):
    with pytest.raises(ConfigError, match=r"resnet18|model=my_net:build|layouts|is empty"):
        run_suite(settings(**changes))


ZOO = ZooSettings(
    device="cpu", precision="fp32", batch_size=2, image_size=64, speed=False, time_limit_s=1.0
)
ENVIRONMENT = {"torch": "2.15.0", "device_name": "a CPU"}
AUDIT = {"lost": 2, "moved_pct": 3.0, "lost_forward": {"cat": 2}, "lost_backward": {}}
SPEED = {
    "speeds": [
        {"images_per_s": 10.0, "peak_memory_gib": 0.5},
        {"images_per_s": 15.0, "peak_memory_gib": 0.6},
    ],
    "pairs": [{"ratio": 1.5, "ci95": [1.4, 1.6], "verdict": "faster"}],
}


def row(name, **more):
    base = {"model": name, "image_size": 64, "convolutions": 3, "parity": {"passed": True}}
    base |= {"audit": AUDIT, **more}
    return {**base, "verdict": verdict(base)}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "loses the layout in 2 calls, 3.0 % of the step's bytes moved"),
        ({"parity": {"passed": False}}, "do not use"),
        ({"convolutions": 0}, "no convolution"),
        ({"train": SPEED, "infer": SPEED}, "train faster (1.50x); infer faster (1.50x); "),
    ],
)
def test_verdicts(more, words):
    assert row("a", **more)["verdict"].startswith(words)


@pytest.mark.parametrize(
    ("name", "image_size"),
    [("resnet18", 64), ("inception_v3", 299), ("timm/mobilevit_xxs", 224)],
)
def test_a_model_of_one_image_size_keeps_it(name, image_size, monkeypatch):
    built = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(zoo.models, "build_model", built)
    with pytest.raises(InterruptedError):
        zoo_row(name, ZOO)
    assert built.call_args.kwargs["image_size"] == image_size


def test_a_model_whose_check_does_not_fit_is_measured_all_the_same(monkeypatch):
    raising = Mock(side_effect=ConfigError("too little memory"))
    monkeypatch.setattr(parity_gate, "parity_of", raising)
    entry = zoo_row(SMALL, ZOO)
    assert entry["parity"] == {"passed": None, "why": "too little memory"}
    assert entry["converted"] == 2 and entry["audit"]["lost"] == 0


def test_the_second_measurement_holds_nothing_of_a_failed_graph(monkeypatch):
    """A live exception would keep the models of the first one in memory."""
    measured = []

    def planted(variants, workload, stop):
        assert sys.exception() is None
        measured.append(workload.settings.cuda_graph)
        if workload.settings.cuda_graph:
            raise ConfigError("the step cannot be recorded")
        return planted_comparison([2.0] * 4)

    monkeypatch.setattr(suite, "benchmark_in_time", planted)
    monkeypatch.setattr(suite, "choose_device", torch.device)
    given = replace(ZOO, device="cuda")
    for can_go_on, graphs in ((True, [True, False]), (False, [True])):
        monkeypatch.setattr(suite, "CAN_GO_ON_AFTER_FAILURE", can_go_on)
        monkeypatch.setattr(suite, "parity_before_use", lambda *args: Parity(True))
        timed = zoo.combination_for(SMALL, "train", 32, given).result()
        assert timed["cuda_graph"] is not can_go_on and ("error" in timed) is not can_go_on
        assert measured == graphs
        measured.clear()


def test_tables_are_continued_and_written_in_both_forms(tmp_path):
    path, with_speed = tmp_path / "zoo.json", replace(ZOO, speed=True)
    rows = row("b", train=SPEED, infer=SPEED), {"model": "a", "error": "out of memory"}
    for number, made in enumerate(rows, 1):
        add_row(path, open_table(path, with_speed, ENVIRONMENT), made)
        assert len(json.loads(path.read_text())["rows"]) == number
    text = re.sub(" +", " ", path.with_suffix(".md").read_text())
    failed, measured = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert failed.startswith("| a |") and failed.endswith("| error: out of memory |")
    assert (
        measured.startswith("| b | 64 | 3 | passed | cat 2 |") and "| 1.5 | 1.40-1.60 |" in measured
    )
    add_row(path, open_table(path, with_speed, ENVIRONMENT), row("a"))
    assert [entry.get("error") for entry in json.loads(path.read_text())["rows"]] == [None, None]
    for text, change in ((path.read_text(), {"batch_size": 3}), ("{", {})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no table of these settings"):
            open_table(path, replace(with_speed, **change), ENVIRONMENT)
    with pytest.raises(ConfigError, match="cannot be written"):
        main(["device=cpu", f"out={path}/new"])


@pytest.mark.slow
def test_the_zoo_runs_continues_times_and_refuses(tmp_path, capsys):
    given = "device=cpu precision=fp32 batch_size=2 data.image_size=64 time_limit_s=5"
    words = ["model=shufflenet_v2_x0_5", *given.split(), f"out={tmp_path}"]
    assert main(words) == 0
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    table = json.loads((tmp_path / f"zoo-chosen-fp32-cpu-torch{version}.json").read_text())
    (entry,) = table["rows"]
    for mode in ("train", "infer"):
        for speed in entry[mode]["speeds"]:
            assert speed["images_per_s"] > 0 and speed["peak_memory_gib"] > 0
        assert entry[mode]["pairs"][0]["ratio"] > 0
    assert entry["parity"]["passed"] and entry["convolutions"] == entry["converted"] == 56
    assert entry["audit"]["lost_forward"] == {"clone": 3, "cat": 13}
    capsys.readouterr()
    assert main(words) == 0
    assert "1 of them done" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean resnet1"):
        main(["model=resnet19"])


def ending(name, settings):
    os._exit(3)


def never_ending(name, settings):
    time.sleep(10_000)


@pytest.mark.slow
def test_a_model_that_ends_its_process_or_takes_too_long_has_an_error():
    assert "exit code 3" in suite.in_child(ending, "a", ZOO, LIMIT_S)["error"]
    assert suite.in_child(never_ending, "a", ZOO, 0.1) == {"model": "a", "error": "over 0.1 s"}


PEERS = pytest.param(lambda words: peers.main(["loader", *words]), ["timm"], marks=pytest.mark.slow)


@pytest.mark.parametrize(("main", "others"), [(loader_benchmark.main, []), PEERS])
def test_the_cores_that_a_rate_needs(main, others, tmp_path, capsys):
    words = ["data.image_size=32", "data.workers=1", "images=32", "batch_size=8", "rounds=2"]
    words += ["gpu_images_per_s=1e9", "json=true"]
    classes = write_folder(tmp_path, train=40, val=2) / "train"
    shutil.rmtree(tmp_path / "val")  # it needs none
    root = tmp_path if others else classes
    assert main([f"data.root={root}", *words]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    reference, *_, row = result["rows"]
    names = [one["pipeline"] for one in result["rows"]]
    assert names == ["torchvision reference", *others, "cl_train"]
    assert (reference["ratio"], row["workers"]) == (1.0, 1)
    assert row["images_per_s"] > 0 and row["ratio"] > 0
    assert result["cores_needed"] == -(-(10**9) // int(row["images_per_s"]))
    assert f"need {result['cores_needed']} cores" in printed.err and "too few" in printed.err
    with pytest.raises(ConfigError, match="does not exist"):
        main([f"data.root={tmp_path}/nowhere"])
    for path in classes.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"truncated.*; to find all: cl-train prepare_imagenet"):
        main([f"data.root={root}", *words])
