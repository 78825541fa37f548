"""What a user types: every choice composes, and every mistake is refused with one line that says what to do."""

import subprocess
import sys
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from cl_train.cli import main
from cl_train.config.command_line import CONF_DIR, GROUPS, CommandLine, check_command_line, compose, group_choices
from cl_train.config.schema import OPTIMIZERS, Config, ConfigError, OptimConfig
from cl_train.config.validation import load, setting_fields, settings_from_arguments
from tests.faults.forkserver import Forked, train_script
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
READ_EPS = " or ".join(f"optim={name}" for name, keys in OPTIMIZERS.items() if "eps" in keys)
CHOICES = [(group, choice) for group in GROUPS for choice in group_choices(group)]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_of_conf_composes(group: str, choice: str) -> None:
    (cfg,) = check_command_line(["-m", f"{group}={choice}", "data.root=/anywhere", "data.dataset=a:b"])
    if group != "experiment" and group != "augment":
        assert getattr(cfg, group).name == {"timm": "lamb"}.get(choice, choice)


def test_an_experiment_beats_config_yaml_and_the_command_line_beats_both() -> None:
    (cfg,) = check_command_line(["experiment=main_amp", "data.root=/x", "batch_size=64"])
    assert (cfg.precision, cfg.model, cfg.batch_size, cfg.data.workers) == ("fp16_o2", "resnet50", 64, 16)
    assert (cfg.optim.lr, cfg.optim.weight_decay, cfg.schedule.step_epochs) == (0.1, 1e-4, 30)


def test_imagenet_takes_the_augmentation_of_the_published_recipes_unless_another_is_named() -> None:
    flips = {}
    for words in ([], ["augment=basic"], ["augment=none"], ["augment.flip=0.25"], ["experiment=resnet50_90ep"]):
        (cfg,) = check_command_line(["data=imagenet", "data.root=/x", *words])
        flips[" ".join(words)] = (cfg.data.name, cfg.augment.flip, cfg.augment.crop_scale_min)
    assert flips == {
        "": ("imagenet", 0.5, 0.08),
        "augment=basic": ("imagenet", 0.0, 0.35),
        "augment=none": ("imagenet", 0.0, 1.0),
        "augment.flip=0.25": ("imagenet", 0.25, 0.08),
        "experiment=resnet50_90ep": ("imagenet", 0.5, 0.08),
    }


RECIPES = {  # data, image size, epochs, optimizer, learning rate
    "": ("sample", 48, 3, "adamw", 0.008),
    "optim=sgd optim.lr=0.1 epochs=5": ("sample", 48, 5, "sgd", 0.1),
    "experiment=smoke": ("sample", 64, 2, "sgd", 0.05),
    "data.root=/x": ("folder", 224, 5, "sgd", 0.1),
    "data=folder data.root=/x": ("folder", 224, 5, "sgd", 0.1),
    "data=synthetic": ("synthetic", 224, 5, "sgd", 0.1),
    "experiment=resnet50_90ep data.root=/x": ("imagenet", 224, 90, "sgd", 0.1),
}


@pytest.mark.parametrize("words", RECIPES)
def test_the_recipe_of_the_sample_is_for_the_sample_only(words: str) -> None:
    (cfg,) = check_command_line(words.split())
    assert (cfg.data.name, cfg.data.image_size, cfg.epochs, cfg.optim.name, cfg.optim.lr) == RECIPES[words]


def test_a_sweep_is_checked_as_a_whole_and_in_order() -> None:
    runs = check_command_line(["-m", "channels_last=true,false", "model=resnet18,vgg11", "seed=range(2)"])
    seen = [(cfg.channels_last, cfg.model, cfg.seed) for cfg in runs]
    assert seen == list(product(["true", "false"], ["resnet18", "vgg11"], [0, 1]))


# command line, and what its message must hold
WRONG = [
    (["chanels_last=true"], "did you mean channels_last"),
    (["+chanels_last=true"], "did you mean channels_last"),
    (["lr=0.1"], "did you mean optim.lr"),
    (["bce_threshold=0.2"], "loss=bce"),
    (["augment.timm_policy=rand-m9-mstd0.5"], "augment.policy=timm"),
    (["data.worker=2"], "did you mean data.workers"),
    (["+epochs=3"], "leave out the '+'"),
    (["~epochs"], "cannot be removed"),
    (["batch_size=abc"], "batch_size=abc: expected whole number >= 1 or auto"),
    (["batch_size=1.5"], "expected whole number"),
    (["batch_size=true"], "expected whole number"),
    (["batch_size=null"], "expected whole number"),
    (["epochs=0"], "epochs=0: expected whole number >= 1"),
    (["optim.lr=-1"], "expected number > 0"),
    (["optim.lr=nan"], "expected number > 0"),
    (["optim.lr=inf"], "expected number > 0"),
    (["channels_last=maybe"], "expected true|false|auto"),
    (["channels_last=1"], "expected true|false|auto"),
    (["precision=fp61"], "did you mean fp16"),
    (["data=imagnet"], "did you mean imagenet"),
    *(([f"optim={name}q"], f"did you mean {name}") for name in OPTIMIZERS),
    (["optim=lamb"], "optim=timm optim.name="),
    (["report=true", "evaluate_every=-1"], "evaluate_every=0"),
    (["experiment=nothing"], "no such choice"),
    (["data=imagenet"], "needs data.root=FOLDER"),
    (["data=shards"], "needs data.root=FOLDER"),
    (["data=dataset"], "needs data.dataset=package.module:function"),
    (["data.image_size=256", "data.val_resize=224"], "is smaller than"),
    (["optim.nesterov=true", "optim.momentum=0"], "needs optim.momentum above 0"),
    (["schedule.warmup_epochs=9", "epochs=5"], "is longer than epochs=5"),
    (["conversion=select"], "select=[NAMES]"),
    (["evaluate_only=true"], "needs weights=... or resume=..."),
    (["data.mean=[1,2]"], "need three numbers"),
    (["channels_last=true,false"], "several values need multirun"),
    (["nproc=2"], "setting of multirun"),
    (["just_a_word"], "settings are written key=value"),
    (["repeats=3"], "setting of multirun"),
    (["data.mean=[[1],[2],[3]]"], "expected list of number"),
    (["augment.mixup=1e-300"], "at least 0.01"),
    (["resume="], "is empty"),
    (["hydra=1"], "hydra.run.dir and hydra.sweep.dir"),
    (["hydra.job.chdir=true"], "hydra.run.dir and hydra.sweep.dir"),
    (["-m", "hydra/launcher=submitit_slurm"], "launcher=slurm"),
    (["-m", "hydra.sweep.subdir=x"], "named after its settings"),
    (["-m", "launcher=slurm", "launcher.gpus=0,1"], "launcher.gpus_per_node"),
    (["-m", "launcher.partition=gpu"], "launcher=slurm"),
    (["launcher=slurm"], "setting of multirun"),
    (["hydra.run.dir="], "needs a folder"),
    (["hydra.run.dir=${nosuch}"], "hydra.run.dir=${nosuch}: "),
    (["--experimental-rerun=file.pickle"], "no option --experimental-rerun"),
    (["--config-dir=/no/such"], "no such folder"),
    (["--epochs=3"], "settings have no dashes: epochs="),
    (["--modle=vgg11"], "did you mean model"),
    (["--modle"], "did you mean model"),
    (["optim.name=adamw"], "write optim=adamw"),
    (["optim.name=lamb"], "only optim=timm"),
    (["optim.library=timm"], "write optim=timm"),
    (["data.name=synthetic"], "write data=synthetic"),
    (["-m", "schedule.name=step,linear"], "write schedule=step,linear"),
    (["--cfg"], "--cfg job"),
    (["-m", "--cfg", "job"], "cannot be combined"),
    (["-m", "channels_last=true,flase"], "channels_last=flase: expected true|false|auto"),
    (["-m", "seed=1,x"], "seed=x: expected whole number"),
    (["seed=1.0"], "seed=1.0: expected whole number"),
    (["batch_size=1e9"], "batch_size=1000000000.0: expected whole number"),
    (["data.workers=100000"], "0 to 256"),
    (["resume=auto", "overwrite=true"], "leave out one"),
    (["data=shards", "data.root=/x", "data.val_fraction=0.1"], "no effect without data=folder"),
    (["data=shards", "data.root=/x", "data.val_split=foo"], "no effect without data=folder"),
    (["data=shards", "data.root=/x", "data.extensions=[.webp]"], "no effect without data=folder"),
    (["optim=adamw", "optim.momentum=0.5"], "no effect without optim=sgd"),
    (["optim=sgd", "optim.beta1=0.5"], "no effect without optim=adamw"),
    (["optim=sgd", "optim.beta2=0.5"], "no effect without optim=adamw"),
    (["optim=null"], "no such choice"),
    (["experiment=null"], "no such choice"),
    (["--config-dir="], "no such folder"),
    (["-m", "hydra.sweep.dir=/a,/b", "channels_last=true,false"], "needs a folder"),
    (["optim=sgd", "optim.eps=1e-5"], f"no effect without {READ_EPS}: leave it out, or write optim.eps=null"),
    (["-m", "optim=glob(z*)"], "optim=glob(z*): the pattern or the range has no value"),
    (["-m", "epochs=range(2,1)"], "epochs=range(2,1): the pattern or the range has no value"),
    (["-m", "optim.lr=interval(0.1,0.2)"], "optim.lr=interval(0.1,0.2): list the values"),
    (["resume_sweep=multirun/x"], "resume_sweep=multirun/x: a setting of multirun, python train.py -m resume_sweep="),
    (["compare_by=precision"], "compare_by=precision: a setting of multirun, python train.py -m compare_by=precision"),
    (["config=/no/such"], "no such file"),
    (["config=conf/optim/sgd.yaml"], "unknown setting 'name'"),
    (["config=conf/config.yaml", "experiment=smoke"], "cannot be combined"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_wrong_command_line_is_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_command_line(arguments)
    message = str(caught.value)
    assert expected in message
    assert "+channels_last" not in message and "append" not in message, "Hydra's advice for a typo must not be seen"
    assert len(message.splitlines()) <= 3


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_command_line(["chanels_last=true", "batch_size=x", "epochs=0", "optim.lr=-1", "data=sampl"])
    assert len(caught.value.problems) == 5


def test_a_typo_in_a_file_of_conf_is_found(tmp_path: Path) -> None:
    values = asdict(Config())
    values["optim"]["momentun"] = 0.9
    with pytest.raises(ConfigError, match=r"unknown setting 'optim.momentun'; did you mean optim.momentum"):
        load(values)


def test_no_file_of_conf_can_name_code() -> None:
    for path in CONF_DIR.rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path
    with pytest.raises(ConfigError, match="unknown setting"):
        check_command_line(["+model._target_=os.system"])


def test_settings_of_scripts_take_lists() -> None:
    from dataclasses import dataclass

    from cl_train.config.schema import setting

    @dataclass
    class Settings:
        models: list[str] = setting(["resnet18"], "models")
        sizes: list[int] = setting([224], "sizes")
        target: float = setting(0.02, "interval", above=0)

    settings = settings_from_arguments(Settings, ["models=vgg11,resnet50", "sizes=64", "target=0.1"])
    assert (settings.models, settings.sizes, settings.target) == (["vgg11", "resnet50"], [64], 0.1)
    with pytest.raises(ConfigError, match="did you mean models"):
        settings_from_arguments(Settings, ["model=vgg11"])


def test_the_program_refuses_with_exit_code_2_and_makes_no_folder(tmp_path: Path) -> None:
    program = [sys.executable, "train.py", "chanels_last=true", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert done.stderr == "configuration error:\n  unknown setting 'chanels_last'; did you mean channels_last?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_unknown_model_is_refused_with_suggestions(tmp_path: Path) -> None:
    refused = Forked(partial(train_script, ["model=resnt50", f"hydra.run.dir={tmp_path}/run"]), tmp_path / "log")
    assert refused.wait() == 2 and "did you mean" in refused.output() and "resnet50" in refused.output()
    assert "Traceback" not in refused.output() and not (tmp_path / "run").exists()


def test_help_shows_settings_groups_and_examples_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    optimizers = f"optim={'|'.join(sorted(OPTIMIZERS))}"
    for word in ("channels_last=false", "true|false|auto", optimizers, "-m channels_last=true,false"):
        assert word in shown, word
    assert main(["train", "--cfg", "job", "epochs=7"]) == 0 and "epochs: 7" in capsys.readouterr().out


@pytest.mark.slow
def test_what_only_the_data_can_tell_is_refused_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    words = ["data=folder", f"data.root={tmp_path}/images", f"hydra.run.dir={tmp_path}/run"]
    refused = Forked(partial(train_script, words), tmp_path / "log")
    assert refused.wait() == 2 and "has no folder 'val'" in refused.output() and "Traceback" not in refused.output()
    assert "run folder" not in refused.output() and not (tmp_path / "run").exists()


def test_a_glob_takes_all_choices_of_a_group_and_optim_timm_takes_a_name() -> None:
    assert {cfg.optim.name for cfg in check_command_line(["-m", "optim=glob(*)"])} == {*OPTIMIZERS, "lamb"}
    (cfg,) = check_command_line(["optim=timm", "optim.name=lion"])
    assert (cfg.optim.library, cfg.optim.name) == ("timm", "lion")
    names = [cfg.optim.name for cfg in check_command_line(["-m", "optim=timm", "optim.name=lamb,muon"])]
    assert names == ["lamb", "muon"]


def test_yaml_aliases_are_refused_before_they_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf/experiment"
    folder.mkdir(parents=True)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (folder / "bomb.yaml").write_text("# @package _global_\n" + "\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="aliases"):
        check_command_line(["experiment=bomb"])


def test_conf_of_the_working_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for group, text in (("experiment", "# @package _global_\nepochs: 77\n"), ("optim", "name: sgd\nlr: 0.77\n")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / ("mine.yaml" if group == "experiment" else "sgd.yaml")).write_text(text)
    monkeypatch.chdir(tmp_path)
    (cfg,) = check_command_line(["experiment=mine", "data=synthetic"])
    assert (cfg.epochs, cfg.optim.lr) == (77, 0.77) and "smoke" in group_choices("experiment")


def test_a_file_lies_between_conf_and_the_command_line(tmp_path: Path) -> None:
    lines = "optim: {name: adamw, weight_decay: 0.1}\ndata: {name: folder, root: /x}\naugment: strong\nepochs: 7\n"
    (tmp_path / "mine.yaml").write_text(lines)
    (cfg,) = check_command_line([f"config={tmp_path}/mine.yaml", "optim.lr=0.3"])
    assert cfg.optim == OptimConfig(name="adamw", lr=0.3, weight_decay=0.1, decay_norm_and_bias=False)
    assert (cfg.data.name, cfg.data.root, cfg.augment.mixup, cfg.epochs) == ("folder", "/x", 0.2, 7)
    (cfg,) = check_command_line([f"config={tmp_path}/mine.yaml", "optim=sgd", "data=synthetic"])
    assert (cfg.optim, cfg.data.root, cfg.epochs) == (OptimConfig(), None, 7), "a chosen group replaces its section"
    runs = check_command_line(["-m", f"config={tmp_path}/mine.yaml", "epochs=1,2"])
    assert [(cfg.epochs, cfg.optim.name) for cfg in runs] == [(1, "adamw"), (2, "adamw")]


def test_recipes_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nepochs: 77\n")
    words = [f"--config-dir={tmp_path}", "experiment=mine", "optim=adamw"]
    (cfg,) = check_command_line(words)
    assert (cfg.epochs, cfg.optim.weight_decay) == (77, 0.05)
    (run,) = compose(CommandLine.parse(["-m", *words]))
    assert check_command_line(run.words) == [cfg], "the jobs of a sweep find it too"


def test_a_value_is_read_in_the_type_of_its_setting() -> None:
    cfg = load({"data": {"root": 2012, "mean": [0, "5e-1", 1]}, "optim": {"lr": "1e-3"}, "channels_last": True})
    assert (cfg.data.root, cfg.data.mean, cfg.optim.lr) == ("2012", [0.0, 0.5, 1.0], 1e-3)
    assert cfg.channels_last == "true" and isinstance(cfg.data.mean[0], float)


def test_settings_say_what_they_affect_in_a_comparison() -> None:
    assert all(item.metadata["help"] for item in setting_fields(Config).values()), "every setting says what it is"
    known = {key: item.metadata["affects"] for key, item in setting_fields(Config).items()}
    assert (known["batch_size"], known["seed"], known["checkpoint.keep"]) == ("speed", "loss", "nothing")


def test_a_value_of_any_length_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_command_line(["weights=" + "x" * 200_000])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "abc"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_half_a_launcher_is_refused_in_one_line(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", f"hydra.run.dir={tmp_path}/run"]) == 2
    printed = capsys.readouterr().err
    assert "torchrun" in printed and "Traceback" not in printed
    assert len(printed.splitlines()) == 2 and not (tmp_path / "run").exists()
