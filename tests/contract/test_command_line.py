"""What a user types: every choice composes, and every mistake is refused with one line that says
what to do.
"""

import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from cl_train.cli import main
from cl_train.config.command_line import (
    GROUPS,
    CommandLine,
    check_command_line,
    compose,
    group_choices,
)
from cl_train.config.schema import FIELDS, OPTIMIZERS, OptimConfig
from cl_train.config.validation import checked_config as load
from cl_train.config.validation import flatten, show
from cl_train.errors import ConfigError
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
READ_EPS = " or ".join(f"optim={name}" for name, keys in OPTIMIZERS.items() if "eps" in keys)
CHOICES = [(group, choice) for group in GROUPS for choice in group_choices(group)]


def config_of(line):
    (cfg,) = check_command_line(line.split())
    return cfg


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_of_conf_composes(group, choice):
    cfg = config_of(f"-m {group}={choice} data.root=/anywhere data.dataset=a:b")
    if group != "experiment" and group != "augment":
        assert getattr(cfg, group).name == {"timm": "lamb"}.get(choice, choice)


# An experiment beats config.yaml, the command line both; the sample has a recipe of its own, and
# ImageNet the augmentation of published ones.
SETTINGS = {
    "": "data=sample data.image_size=48 epochs=3 optim=adamw optim.lr=0.008",
    "optim=sgd optim.lr=0.1 epochs=5": "data.image_size=48 epochs=5 optim=sgd optim.lr=0.1",
    "experiment=smoke": "data=sample data.image_size=64 epochs=2 optim=sgd optim.lr=0.05",
    "data.root=/x": "data=folder data.image_size=224 epochs=5 optim=sgd optim.lr=0.1",
    "data=synthetic": "data=synthetic data.image_size=224 epochs=5 optim=sgd optim.lr=0.1",
    "data=imagenet data.root=/x": "augment.flip=0.5 augment.crop_scale_min=0.08",
    "data=imagenet data.root=/x augment=basic": "augment.flip=0 augment.crop_scale_min=0.35",
    "data=imagenet data.root=/x augment.flip=0.2": "augment.flip=0.2 augment.crop_scale_min=0.08",
    "experiment=resnet50_90ep data.root=/x": "data=imagenet epochs=90 augment.flip=0.5",
    "experiment=main_amp data.root=/x batch_size=64": "precision=fp16_o2 model=resnet50"
    " batch_size=64 data.workers=16 optim.lr=0.1 optim.weight_decay=0.0001",
}


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_of_a_command_line(words):
    found = dict(flatten(asdict(config_of(words))))
    found |= {group: found[f"{group}.name"] for group in ("data", "optim")}
    for word in SETTINGS[words].split():
        key, _, value = word.partition("=")
        assert show(found[key]) == value, word


def test_a_sweep_is_checked_as_a_whole_and_in_order():
    words = "-m channels_last=true,false model=resnet18,vgg11 seed=range(2)"
    runs = check_command_line(words.split())
    seen = [(cfg.channels_last, cfg.model, cfg.seed) for cfg in runs]
    assert seen == list(product(["true", "false"], ["resnet18", "vgg11"], [0, 1]))


# what the message must hold, and command lines
WRONG = [
    ("did you mean channels_last", "chanels_last=true", "+chanels_last=true"),
    ("did you mean optim.lr", "lr=0.1"),
    ("loss=bce", "bce_threshold=0.2"),
    ("did you mean randaugment", "augment.policy=randaug"),
    ("leave out the '+'", "+epochs=3", "-m +hydra.run.dir=/x"),
    ("cannot be removed", "~epochs"),
    ("expected whole number >= 1", "batch_size=abc", "batch_size=1.5", "batch_size=null"),
    (
        "experiment=main_amp model=resnet50 data.workers=16 batch_size=200 channels_last=true "
        "precision=fp16_o2 data.root=./data",
        "-a resnet50 --b 200 --workers 16 --opt-level O2 --channels-last true ./data",
    ),
    ("expected number > 0", "optim.lr=-1", "optim.lr=nan", "optim.lr=inf"),
    ("expected true|false|auto", "channels_last=maybe", "-m channels_last=true,flase"),
    ("did you mean fp16", "precision=fp61"),
    ("optim=timm optim.name=", "optim=lamb"),
    ("evaluate_every=0", "report=true evaluate_every=-1"),
    ("no such choice", "experiment=nothing", "optim=null"),
    ("needs data.root=FOLDER", "data=imagenet", "data=shards"),
    ("needs data.dataset=package.module:function", "data=dataset"),
    ("is longer than epochs=5", "schedule.warmup_epochs=9 epochs=5"),
    ("select=[NAMES]", "conversion=select"),
    ("needs weights=... or resume=...", "evaluate_only=true"),
    ("several values need multirun", "channels_last=true,false"),
    ("setting of multirun", "nproc=2", "repeats=auto", "launcher.gpus=all", "resume_sweep=a/x"),
    ("settings are written key=value", "mobilenet_v2"),
    ("is empty", "resume="),
    ("use some of .jpg", "data.extensions=[]", "data.extensions=[.jpg,.gif]"),
    ("hydra.run.dir and hydra.sweep.dir", "hydra=1", "hydra.sweep.subdir=x"),
    ("did you mean launcher.gpus", "launcher.gpu=all"),
    ("needs a folder", "hydra.run.dir=", "-m hydra.sweep.dir=/a,/b channels_last=true,false"),
    ("hydra.run.dir=${nosuch}: ", "hydra.run.dir=${nosuch}"),
    ("no such folder", "--config-dir=/no/such"),
    ("settings have no dashes: batch_size=16", "--batch-size=16", "-b=16"),
    ("did you mean model", "--modle=vgg11"),
    ("write optim=adamw", "optim.name=adamw"),
    ("only optim=timm", "optim.name=lamb"),
    ("cannot be combined", "-m --cfg job", "config=conf/config.yaml experiment=smoke"),
    ("leave out one", "resume=auto overwrite=true"),
    ("no effect without data=folder", "data=shards data.root=/x data.val_fraction=0.1"),
    (f"no effect without {READ_EPS}: ", "optim=sgd optim.eps=1e-5"),
    ("optim=glob(z*): the pattern or the range has no value", "-m optim=glob(z*)"),
    ("optim.lr=interval(0.1,0.2): list the values", "-m optim.lr=interval(0.1,0.2)"),
    ("no such file", "config=/no/such"),
    ("unknown setting 'name'", "config=conf/optim/sgd.yaml"),
]
LINES = [(line, said) for said, *lines in WRONG for line in lines]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[line for line, _ in LINES])
def test_a_wrong_command_line_is_refused(line, said):
    with pytest.raises(ConfigError) as caught:
        check_command_line(line.split())
    message = str(caught.value)
    assert said in message
    assert "+channels_last" not in message and "append" not in message, "Hydra's advice"
    assert len(message.splitlines()) <= 3


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        config_of("chanels_last=true batch_size=x epochs=0 optim.lr=-1 data=sampl")
    assert len(caught.value.problems) == 5


def test_the_program_refuses_with_exit_code_2_and_makes_no_folder(tmp_path):
    program = [sys.executable, "train.py", "chanels_last=true", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    said = "unknown setting 'chanels_last'; did you mean channels_last?"
    assert (done.returncode, done.stderr) == (2, f"configuration error:\n  {said}\n")
    assert not (tmp_path / "run").exists()


def test_help_shows_settings_groups_and_examples_without_torch(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    optimizers = f"optim={'|'.join(sorted(OPTIMIZERS))}"
    layouts = ("channels_last=false", "true|false|auto", "-m channels_last=true,false")
    for word in (*layouts, optimizers):
        assert word in shown, word
    assert main(["train", "--cfg", "job", "epochs=7"]) == 0
    assert "epochs: 7" in capsys.readouterr().out


def test_a_glob_takes_all_choices_of_a_group_and_optim_timm_takes_names():
    runs = check_command_line(["-m", "optim=glob(*)", "data=synthetic"])
    assert {cfg.optim.name for cfg in runs} == {*OPTIMIZERS, "lamb"}
    lr = FIELDS["optim.lr"]
    assert all(show(cfg.optim.lr) in f"{lr.default} {lr.help}" for cfg in runs), "--help says them"
    runs = check_command_line(["-m", "optim=timm", "optim.name=lamb,muon"])
    assert [(cfg.optim.library, cfg.optim.name) for cfg in runs] == [
        ("timm", "lamb"),
        ("timm", "muon"),
    ]


def test_conf_of_the_working_folder_comes_first(tmp_path, monkeypatch):
    for name, text in (
        ("experiment/mine", "# @package _global_\nepochs: 77\n"),
        ("optim/sgd", "name: sgd\nlr: 0.77\n"),
    ):
        path = tmp_path / f"conf/{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    cfg = config_of("experiment=mine data=synthetic")
    assert (cfg.epochs, cfg.optim.lr) == (77, 0.77) and "smoke" in group_choices("experiment")


def test_a_file_lies_between_conf_and_the_command_line(tmp_path):
    lines = "optim: {name: adamw, weight_decay: 0.1}\ndata: {name: folder, root: /x}\n"
    lines += "augment: strong\nepochs: 7\n"
    (tmp_path / "mine.yaml").write_text(lines)
    mine = f"config={tmp_path}/mine.yaml"
    cfg = config_of(f"{mine} optim.lr=0.3")
    adamw = OptimConfig(name="adamw", lr=0.3, weight_decay=0.1, decay_norm_and_bias=False)
    assert cfg.optim == adamw
    assert (cfg.data.name, cfg.data.root, cfg.augment.mixup, cfg.epochs) == ("folder", "/x", 0.2, 7)
    runs = check_command_line(["-m", mine, "optim=sgd", "data=synthetic", "epochs=1,2"])
    for cfg, epochs in zip(runs, (1, 2), strict=True):  # a chosen group replaces its section
        assert (cfg.optim, cfg.data.root, cfg.epochs) == (OptimConfig(), None, epochs)


def test_recipes_of_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEED", "7")
    folder = tmp_path / "a b,c=d'e"
    (folder / "experiment").mkdir(parents=True)
    recipe = "epochs: 77\nseed: ${oc.env:SEED}\nhydra: {run: {dir: 'runs/${model}'}}\n"
    (folder / "experiment/mine.yaml").write_text(f"# @package _global_\n{recipe}")
    words = [f"--config-dir={folder}", "experiment=mine", "optim=adamw"]
    (run,) = compose(CommandLine.parse(["-m", *words]))
    assert (run.cfg.epochs, run.cfg.seed, run.cfg.optim.weight_decay) == (77, 7, 0.05)
    assert str(run.folder("run")) == "runs/resnet18"
    assert check_command_line(run.words) == [run.cfg], "the jobs of a sweep find it too"
    (folder / "experiment/mine.yaml").write_text("epochs: [1\n")
    with pytest.raises(ConfigError, match=r"cannot be read: .*mine\.yaml"):
        check_command_line(words)


def test_a_value_is_read_in_the_type_of_its_setting():
    data, optim = {"root": 2012, "mean": [0, "5e-1", 1]}, {"lr": "1e-3"}
    cfg = load({"data": data, "optim": optim, "channels_last": True})
    assert (cfg.data.root, cfg.data.mean, cfg.optim.lr) == ("2012", [0.0, 0.5, 1.0], 1e-3)
    assert cfg.channels_last == "true" and isinstance(cfg.data.mean[0], float)


@pytest.mark.parametrize("variables", [{"RANK": "abc"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_half_a_launcher_is_refused_in_one_line(variables, tmp_path, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", f"hydra.run.dir={tmp_path}/run"]) == 2
    printed = capsys.readouterr().err
    assert "torchrun" in printed and "Traceback" not in printed
    assert len(printed.splitlines()) == 2 and not (tmp_path / "run").exists()
