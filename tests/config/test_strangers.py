"""What a run left is data: a stranger's run, sweep, checkpoint and weights name code, and no
command runs it. Where a command needs the code, it prints the word to repeat.
"""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import cl_train
from cl_train.cli import main
from cl_train.config.command_line import CommandLine, check_command_line, compose
from cl_train.errors import ConfigError
from cl_train.models.card import ModelCard
from cl_train.models.files import SavedModel, write_weights
from cl_train.sweeps.plan import Job
from cl_train.system import checkpoints

NAMES = dict.fromkeys(("model", "loss", "metrics"), "evil:f") | {"log_to": ["evil:f"]}
TINY = "data=synthetic data.synthetic_images=4 data.synthetic_classes=2 data.image_size=32"
TINY += " batch_size=2 max_steps=1 device=cpu precision=fp32 log_to=[]"
ALL = "model=evil:f loss=evil:f metrics=evil:f log_to=[evil:f] data.dataset=evil:f"
# what is planted; the command; the words that it must print ("": it does not need the code)
TABLE = [
    ("run", "train config=RUN", ALL),
    ("run", "train config=RUN model=resnet18", ALL.removeprefix("model=evil:f ")),
    ("run", "train evaluate_only=true resume=RUN", ALL),
    ("run", "train evaluate_only=true resume=auto hydra.run.dir=RUN", ALL),
    ("run", "benchmark config=RUN", "model=evil:f"),
    ("run", "compare RUN RUN", ""),
    ("sweep", "train -m resume_sweep=SWEEP", ALL.removesuffix(" data.dataset=evil:f")),
    ("sweep", "train -m resume_sweep=SWEEP model=other:f", "model=evil:f"),
    ("checkpoint", f"train resume=RUN/checkpoints/best.pt {TINY} hydra.run.dir=new", ""),
    ("checkpoint", f"train weights=RUN {TINY} model=squeezenet1_1 hydra.run.dir=new", ""),
    ("checkpoint", "predict weights=RUN data.root=images out=x.csv", "model=evil:f"),
    ("checkpoint", "convert RUN out=x.onnx input=1,3,32,32", "model=evil:f"),
    ("checkpoint", "audit weights=RUN model=squeezenet1_1 data.image_size=32 batch_size=2", ""),
    ("checkpoint", "load_model RUN", "model=evil:f"),
    (".pth", "convert FILE out=x.pt2 input=1,3,32,32", "model=evil:f"),
    (".safetensors", "convert FILE out=x.pth", "model=evil:f"),
]
OF_JOB = ["experiment=evil", "model=evil:f", "metrics=evil:f", "log_to=[evil:f]"]  # and loss


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step, as the honest program leaves it."""
    folder = tmp_path_factory.mktemp("stranger") / "run"
    cl_train.train(*TINY.split(), f"hydra.run.dir={folder}", model="squeezenet1_1")
    return folder


def plant(kind, trained, folder):
    (folder / "conf/experiment").mkdir(parents=True)
    (folder / "conf/experiment/evil.yaml").write_text("# @package _global_\nloss: evil:f\n")
    (folder / "evil.py").write_text("open('imported', 'w'); raise SystemExit('imported')\n")
    (folder / "other.py").write_text("f = dict\n")
    (folder / "images/a").mkdir(parents=True)
    if kind == "sweep":
        (folder / "sweep").mkdir()
        job = vars(Job(0, "job", OF_JOB))
        document = {"schema_version": 2, "compare_by": "channels_last", "jobs": [job]}
        (folder / "sweep/sweep.json").write_text(json.dumps(document))
        return
    shutil.copytree(trained, folder / "run")
    if kind == "run":
        config = yaml.safe_load((trained / "config.yaml").read_text())
        config = config | NAMES | {"data": config["data"] | {"dataset": "evil:f"}}
        (folder / "run/config.yaml").write_text(yaml.safe_dump(config))
    state = checkpoints.load(next(trained.glob("checkpoints/step-*.pt")))
    if kind == "checkpoint":
        state["facts"] |= {"model": "evil:f", "config": state["facts"]["config"] | NAMES}
        for path in (folder / "run/checkpoints").iterdir():
            checkpoints.write(path, state)
    if kind.startswith("."):
        card = ModelCard(model="evil:f", classes=("a", "b"))
        write_weights(SavedModel("state dict", state["model"], card), folder / f"w{kind}")


def run_command(words):
    """The exit code and all output of a command, in this process."""
    if words[0] == "load_model":
        with pytest.raises(cl_train.ConfigError) as caught:
            cl_train.load_model(words[1])
        return 2, str(caught.value)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        return main(words), output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "command", "words"), TABLE, ids=[f"{k}: {c}" for k, c, _ in TABLE]
)
def test_no_command_imports_what_a_stranger_named(
    kind, command, words, trained, tmp_path, monkeypatch
):
    plant(kind, trained, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m cl_train` does
    for word, name in {"RUN": "run", "SWEEP": "sweep", "FILE": f"w{kind}"}.items():
        command = command.replace(word, name)
    typed = command.split()
    code, output = run_command(typed)
    assert not Path("imported").exists() and "evil" not in sys.modules
    assert "Traceback" not in output
    if words:
        assert code == 2 and not [*tmp_path.glob("x.*")], "refused before a file is written"
        assert all(word in output for word in words.split()), output


def test_what_the_user_names_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nloss: mine:f\n")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    config = "loss: mine:f\nlog_to: [tensorboard, mine:g]\nhydra: {run: {dir: precious}}\n"
    (tmp_path / "run/config.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    for words in (
        ["experiment=mine"],
        ["config=run/config.yaml"],
        ["config=run", "loss=mine:f", "log_to=[]"],
        ["evaluate_only=true", "resume=run", "loss=mine:f", "log_to=[mine:g]"],
    ):
        (run,) = compose(CommandLine.parse(words))
        is_trusted = words[0] == "config=run/config.yaml"
        assert run.cfg.loss == "mine:f", words
        writes_to = OmegaConf.to_container(run.raw.hydra)["run"]["dir"]
        assert (writes_to == "precious") == is_trusted


@pytest.mark.parametrize("resume", ["a/best.pt", "a/checkpoints", "a/checkpoints/best.pt"])
def test_an_evaluation_reads_the_settings_of_its_run_and_no_other(resume, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a/checkpoints").mkdir(parents=True)
    for name in ("a/best.pt", "a/checkpoints/best.pt"):
        Path(name).touch()
    Path("a/config.yaml").write_text("seed: 2\n")
    (cfg,) = check_command_line(["evaluate_only=true", f"resume={resume}"])
    assert cfg.seed == (2 if resume.startswith("a/checkpoints") else 0)


def test_a_file_of_settings_cannot_delete_a_run(tmp_path, monkeypatch):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    recipe = "# @package _global_\noverwrite: true\nhydra: {run: {dir: precious}}\n"
    (tmp_path / "conf/experiment/mine.yaml").write_text(recipe)
    (tmp_path / "old.yaml").write_text("overwrite: true\nepochs: 7\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="overwrite=true deletes an earlier run: type it"):
        check_command_line(["experiment=mine"])
    (run,) = compose(CommandLine.parse(["experiment=mine", "overwrite=true"]))
    assert run.cfg.overwrite and str(run.folder("run")) == "precious"
    (cfg,) = check_command_line(["config=old.yaml"])
    assert cfg.epochs == 7 and not cfg.overwrite


def test_it_composes_inside_a_program_that_uses_hydra(tmp_path):
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        callers = GlobalHydra.instance().hydra
        (cfg,) = check_command_line(["epochs=3"])
        assert cfg.epochs == 3 and GlobalHydra.instance().hydra is callers


ALIASES = "a0: &a0 [1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def test_a_config_that_would_fill_the_memory_is_refused(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "run2"):
        shutil.copytree(trained, name)
    Path("run/config.yaml").write_text(ALIASES)
    for command in ("train config=run", "compare run run2"):
        code, output = run_command(command.split())
        assert code == 2 and "run/config.yaml cannot be read" in output, output
