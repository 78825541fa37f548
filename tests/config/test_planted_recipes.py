"""Files of settings from a stranger: none of them runs code, and each attempt is refused in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cl_train.config.command_line import CommandLine, compose
from cl_train.config.schema import ConfigError
from tests.processes import LIMIT_S

CALL = "{_target_: os.mkdir, path: planted}"
RECIPE = "conf/experiment/recipe.yaml"
GLOBAL = "# @package _global_\n"
LOG = "{version: 1, handlers: {x: {(): os.mkdir, path: planted}}, root: {handlers: [x]}}"

_OF_HYDRA = {  # what a recipe sets of Hydra
    "callback": f"callbacks: {{x: {CALL}}}",
    "launcher": f"launcher: {CALL}",
    "sweeper": f"sweeper: {CALL}",
    "partial": "callbacks: {x: {_target_: os.mkdir, _partial_: true}}",
    "nested target": f"callbacks: {{x: {{_target_: builtins.list, y: {CALL}}}}}",
    "interpolated target": f"callbacks: ${{oc.create:'{{x: {CALL}}}'}}",
    "job logging": f"job_logging: {LOG}",
    "hydra logging": f"hydra_logging: {LOG}",
    "log file": "job_logging: {handlers: {file: {filename: planted}}}",
    "environment": "job: {env_set: {PYTHONSTARTUP: planted}}",
    "chdir": "job: {chdir: true}",
    "output folder": "output_subdir: ../planted",
    "sweep subfolder": "sweep: {subdir: ../planted}",
    "verbose": "verbose: true",
    "unknown resolver in the folder": "run: {dir: '${sh:mkdir planted}'}",
    "search path": "searchpath: ['pkg://evil']",
}
_OWN_FILES = {  # what the defaults of a recipe name, and the content of that file
    "own group hydra/callbacks": ("/hydra/callbacks: evil", "hydra/callbacks/evil", f"x: {CALL}"),
    "own hydra/config": ("/hydra/config", "hydra/config", f"callbacks: {{x: {CALL}}}"),
    "own launcher": ("override /hydra/launcher: evil", "hydra/launcher/evil", CALL),
    "own sweeper": ("override /hydra/sweeper: evil", "hydra/sweeper/evil", CALL),
    "own job_logging": ("override /hydra/job_logging: evil", "hydra/job_logging/evil", LOG),
    "package of a default": ("/optim@hydra.callbacks: evil", "optim/evil", f"x: {CALL}"),
}
_SETTINGS = {  # what a recipe sets of the run
    "target at the top": "_target_: os.mkdir\npath: planted",
    "target of a setting": f"model: {CALL}",
    "yaml object": "model: !!python/object/apply:os.mkdir [planted]",
    "yaml module": "model: !!python/module:evil",
    "unknown resolver": 'model: ${eval:\'__import__("os").mkdir("planted")\'}',
    "decode": 'seed: ${oc.decode:\'__import__("os").mkdir("planted")\'}',
    "alias": f"x: &x {CALL}\nhydra: {{callbacks: {{x: *x}}}}",
    "bomb": "a0: &a0 [x,x,x]\n" + "\n".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 12)),
}
SEARCH_PATH = "defaults: [schema]\nhydra: {{searchpath: ['pkg://{}']}}"
_HYDRA_CALL = f"hydra: {{callbacks: {{x: {CALL}}}}}"
# name: files, and the words of the command line (default: experiment=recipe)
PLANTED: dict[str, tuple[dict[str, str], list[str]]] = {
    **{name: ({RECIPE: f"{GLOBAL}hydra: {{{text}}}"}, []) for name, text in _OF_HYDRA.items()},
    **{
        name: ({RECIPE: f"{GLOBAL}defaults:\n- {default}", f"conf/{file}.yaml": text}, [])
        for name, (default, file, text) in _OWN_FILES.items()
    },
    **{name: ({RECIPE: GLOBAL + text}, []) for name, text in _SETTINGS.items()},
    "callback by package": ({RECIPE: f"# @package hydra.callbacks\nx: {CALL}"}, []),
    "package hydra": ({RECIPE: f"# @package hydra\ncallbacks: {{x: {CALL}}}"}, []),
    "own search path": ({"conf/config.yaml": SEARCH_PATH.format("evil")}, ["epochs=1"]),
    "search path of a package": (
        {"conf/config.yaml": SEARCH_PATH.format("evil.conf"), "evil/__init__.py": "", "evil/conf/x.yaml": ""},
        ["epochs=1"],
    ),
    "own config.yaml": ({"conf/config.yaml": f"defaults: [schema]\n{_HYDRA_CALL}"}, ["epochs=1"]),
    "target of a group": ({"conf/optim/sgd.yaml": f"name: sgd\nx: {CALL}"}, ["optim=sgd"]),
    "config=FILE": ({"f.yaml": _HYDRA_CALL}, ["config=f.yaml"]),
    "config=FILE with an object": ({"f.yaml": _SETTINGS["yaml object"]}, ["config=f.yaml"]),
    "config=FILE with defaults": ({"f.yaml": "defaults: [{hydra/launcher: evil}]"}, ["config=f.yaml"]),
    "config=RUN": ({"run/config.yaml": f"model: {CALL}"}, ["config=run"]),
    "resume=RUN": ({"run/config.yaml": f"hydra: {{callbacks: {CALL}}}"}, ["evaluate_only=true", "resume=run"]),
    "--config-dir": ({"dir/" + RECIPE[5:]: GLOBAL + _HYDRA_CALL}, ["--config-dir=dir", "experiment=recipe"]),
    "--config-dir with config.yaml": ({"dir/config.yaml": f"defaults: [schema]\n{_HYDRA_CALL}"}, ["--config-dir=dir"]),
}


def plant(files: dict[str, str], folder: Path) -> None:
    for name, text in {"evil.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("import os; os.mkdir('planted')" if name.endswith(".py") else text)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_file_is_refused_and_runs_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, words = PLANTED[name]
    plant(files, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m cl_train` does
    OmegaConf.register_new_resolver("run_name", lambda *_: "name", replace=True)  # else every folder is refused
    with pytest.raises(ConfigError) as caught:
        compose(CommandLine.parse(words or ["experiment=recipe"]))[0].folder("run")
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not list(tmp_path.rglob("planted")) and "evil" not in sys.modules


def test_settings_of_hydra_itself_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant({"conf/hydra/config.yaml": f"callbacks: {{x: {CALL}}}", "conf/hydra/launcher/basic.yaml": CALL}, tmp_path)
    monkeypatch.chdir(tmp_path)
    (run,) = compose(CommandLine.parse(["epochs=1"]))
    assert run.raw.hydra.keys() == {"run", "sweep"} and not list(tmp_path.rglob("planted"))


def test_what_is_harmless_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = f"{GLOBAL}seed: ${{oc.env:SEED}}\nhydra: {{run: {{dir: 'runs/${{model}}'}}, sweep: {{dir: sweeps}}}}"
    plant({RECIPE: recipe, "conf/experiment/other.yaml": "x: &x 1\ny: *x"}, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEED", "7")
    (run,) = compose(CommandLine.parse(["experiment=recipe"]))
    assert run.cfg.seed == 7, "an alias in a file that is not used blocks nothing"
    assert (str(run.folder("run")), str(run.folder("sweep"))) == ("runs/resnet18", "sweeps")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["callback", "job logging", "a plugin"])
def test_the_program_runs_nothing_that_was_planted(name: str, tmp_path: Path) -> None:
    plugin = {"hydra_plugins/evil/__init__.py": "", "hydra_plugins/evil.py": "", "hydra_plugins/x/y.py": ""}
    files, words = PLANTED.get(name, (plugin, ["--cfg", "job"]))
    plant(files, tmp_path)
    program = [sys.executable, "-m", "cl_train", "train", *(words or ["experiment=recipe"])]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == (0 if name == "a plugin" else 2), done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("planted"))
