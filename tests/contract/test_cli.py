"""`cl-train`: the same grammar, help, completion and console behaviour for every command."""

import importlib
import runpy
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cl_train.cli import main
from cl_train.commands import COMMANDS, completion, train
from cl_train.commands.audit import AuditSettings
from cl_train.commands.completion import candidates
from cl_train.config.arguments import command_help, is_setting, settings_from_arguments
from cl_train.config.fields import Range, setting_fields
from cl_train.config.schema import BenchmarkSettings, Config, setting
from cl_train.errors import ConfigError
from cl_train.models.sources import model_names, timm_model_names
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Example:
    """Settings of a command."""

    root: str | None = setting(None, "folder of images", key="data.root")
    models: list[str] = setting(["resnet18"], "models")
    sizes: list[int] = setting([224], "sizes", Range(8))
    time_limit_s: float = setting(1.5, "seconds", Range(above=0))
    deep: bool = setting(False, "decode")
    json: bool = setting(False, "print JSON")
    out: str | None = setting(None, "file")


def test_settings_take_lists_and_a_key_can_differ_from_the_name_of_its_field():
    words = "data.root=/images sizes=64,96 models=vgg11,resnet50"
    settings = settings_from_arguments(Example, words.split())
    assert (settings.root, settings.sizes, settings.time_limit_s) == ("/images", [64, 96], 1.5)
    assert settings.models == ["vgg11", "resnet50"]
    settings = settings_from_arguments(Example, ["sizes=64", "time_limit_s=0.1"])
    assert (settings.sizes, settings.time_limit_s) == ([64], 0.1)


def test_benchmark_and_audit_start_from_a_run_and_what_is_typed_comes_first(tmp_path):
    text = "model: vgg11\nprecision: bf16\nbatch_size: 7\nchannels_last: auto\nepochs: 3\n"
    text += "optim: {name: adamw}\ndata: {root: photos, image_size: 96}\n"
    (tmp_path / "config.yaml").write_text(text)
    words = [f"config={tmp_path}", "precision=fp32"]
    benchmark = settings_from_arguments(BenchmarkSettings, words)
    assert (benchmark.model, benchmark.precision) == (["vgg11"], ["fp32"])
    assert (benchmark.batch_size, benchmark.image_size, benchmark.optimizer) == ([7], 96, "adamw")
    audited = settings_from_arguments(AuditSettings, words)
    assert (audited.model, audited.image_size, audited.channels_last) == ("vgg11", 96, True)
    with pytest.raises(ConfigError, match="no such file"):
        settings_from_arguments(AuditSettings, ["config=nowhere"])


WRONG = [
    ("--ouut=x", "did you mean out"),
    ("model=vgg11", "did you mean models"),
    ("--deep", "deep="),
    ("root=/x", "data.root"),
    ("word", "key=value"),
    ("sizes=4", ">= 8"),
    ("sizes=a", "of whole number"),
    ("sizes=224,", "sizes=224,: an item is empty"),
]


@pytest.mark.parametrize(("word", "named"), WRONG)
def test_a_wrong_word_is_refused_with_the_right_spelling(word, named):
    with pytest.raises(ConfigError) as caught:
        settings_from_arguments(Example, [word])
    assert word.partition("=")[0] in str(caught.value) and named in str(caught.value)


def test_a_checkpoint_that_does_not_exist_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.pt"):
        train.main([f"resume={tmp_path}/none.pt", f"hydra.run.dir={tmp_path}/run", "device=cpu"])
    assert not (tmp_path / "run").exists()


def test_folders_are_no_settings():
    assert not any(map(is_setting, ("outputs/a=1", "./channels_last=true", "multirun/x")))
    assert all(map(is_setting, ("out=x", "data.root=/a=b", "--by")))


def test_help_states_name_default_meaning_type_and_range():
    text = command_help("", "", {"settings": Example})
    named = ("data.root=null", "sizes=[224]", "time_limit_s=1.5")
    for part in (*named, "folder of images", "whole number >= 8", "number > 0"):
        assert part in text
    # What a group sets is hidden, and numbers are rounded.
    text = command_help("", "", {"settings": Config})
    assert "  data.name=" not in text and "optim.lr=0.1" in text


def test_the_same_key_has_the_same_type_in_every_command():
    takes_several = ["model", "precision", "batch_size", "compile", "cuda_graph", "data.workers"]
    known = {
        key: (item.base_type, item.list_depth)
        for key, item in setting_fields(Config).items()
        if key not in takes_several and item.choices != ("true", "false", "auto")
    }
    for name in COMMANDS:
        command = importlib.import_module(f"cl_train.commands.{name}")
        for schema in getattr(command, "SETTINGS", {}).values():
            for key, item in setting_fields(schema).items():
                own = (item.base_type, item.list_depth)
                assert known.get(key, own) == own, (name, key)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cl-train tr", ["train "]),
        ("cl-train train channels_last=", ["true", "false", "auto"]),
        ("cl-train train optim=a", ["adamw"]),
        ("cl-train train schedule.na", []),
        ("cl-train train -m precision=fp32,b", ["fp32,bf16"]),
        ("cl-train convert channels_last=f", ["false"]),
        ("cl-train train model=timm/resnet1", ["timm/resnet18"]),
    ],
)
def test_completion(line, expected):
    found = candidates(line)
    assert set(expected) <= set(found) and (expected or not found)


def test_models_are_completed_without_importing_them():
    for package, known in (("torchvision", model_names()), ("timm", timm_model_names())):
        assert completion.model_names(package) == sorted(known)
    script = "import sys; from cl_train.commands.completion import candidates as of; "
    script += "assert of('x train model=resnet1') and not {'torch', 'torchvision'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_bash_completes_with_the_line_of_the_documentation(capsys):
    query = "COMP_LINE='cl-train train data.r' COMP_POINT=21 PYTHON -m cl_train completion query"
    done = shell(f'eval "$(PYTHON -m cl_train completion)"; complete -p cl-train; {query}')
    assert "-C 'cl-train completion query' cl-train\ndata.root=\n" in done.stdout
    assert main(["completion", "--help"]) == 0 and "cl-train completion" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    assert main(["adit"]) == 2 and "did you mean audit" in capsys.readouterr().err


def test_each_script_runs_its_command(monkeypatch):
    started = []
    monkeypatch.setattr("cl_train.cli.program", started.append)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    for name in COMMANDS.keys() - {"train", "completion"}:
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        assert started.pop() == name and not started


def shell(line):
    script = line.replace("PYTHON", sys.executable)
    run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT_S)
    return run(["bash", "-c", script], cwd=ROOT)


def test_nobody_reads_the_output():
    done = shell("PYTHON train.py --help | true; exit ${PIPESTATUS[0]}")
    assert done.returncode == 141 and done.stderr == "", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ["| head -1; exit ${PIPESTATUS[0]}", ">/dev/full", ">&-"])
def test_a_run_goes_on_without_its_console(end, tmp_path):
    run = tmp_path / "run"
    words = f"experiment=smoke data=synthetic batch_size=2 max_steps=4 hydra.run.dir={run}"
    done = shell(f"PYTHON train.py {words} {end}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Logging error" not in done.stderr
    assert '"status": "completed"' in (run / "summary.json").read_text()


def test_a_batch_that_no_memory_holds_is_refused(capsys):
    assert main(["audit", "model=resnet18", "device=cpu", "data.image_size=10000000"]) == 2
    assert "a batch of [32, 3, 10000000, 10000000]: out of memory" in capsys.readouterr().err
