"""`cl_train.train(...)`: a run in the process of the caller, which goes on."""

import json
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

import cl_train
from cl_train.cli import main
from cl_train.config.schema import ConfigError
from cl_train.training.state import TrainingFault
from tests.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
TINY = {"data": {"image_size": 32, "workers": 0}, "device": "cpu", "precision": "fp32", "batch_size": 16, "epochs": 1}
TINY |= {"model": "tests.networks:small", "log_every": 1, "warmup_steps": 1, "log_to": []}


@pytest.fixture
def settings(image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    return TINY | {"data": {**TINY["data"], "root": image_folder}}  # type: ignore[dict-item]


def test_two_runs_in_one_process(settings: dict[str, object], tmp_path: Path) -> None:
    first = cl_train.train("data=folder", "channels_last=true", **settings)
    second = cl_train.train("data=folder", f"hydra.run.dir={tmp_path}/b", **{**settings, "optim.lr": 0.2})
    assert first.folder.is_relative_to(tmp_path / "outputs") and second.folder == tmp_path / "b"
    for result, layout in ((first, "channels_last"), (second, "contiguous")):
        assert result.summary == json.loads((result.folder / "summary.json").read_text())
        assert result.summary["memory_format"] == layout
        assert result.summary["command"].startswith("cl_train.train('data=folder'")
        assert result.top1 == result.summary["val"]["top1"] and (result.images_per_s or 0) > 0 and result.exit_code == 0
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_settings_of_a_run_are_reused(settings: dict[str, object], tmp_path: Path) -> None:
    first = cl_train.train("data=folder", f"hydra.run.dir={tmp_path}/a", "optim=adamw", "optim.lr=1e-3", **settings)
    again = cl_train.train(f"config={first.folder}", "seed=1", f"hydra.run.dir={tmp_path}/b")
    evaluated = cl_train.train("evaluate_only=true", resume=first.folder, batch_size=5)
    assert again.summary["train"] != first.summary["train"] and again.summary["global_batch_size"] == 16
    config = (again.folder / "config.yaml").read_text()
    assert "name: adamw\n  lr: 0.001\n" in config and "seed: 1\n" in config
    assert evaluated.top1 == first.top1 and evaluated.images_per_s is None and evaluated.folder != first.folder


def test_faults_are_raised(settings: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="did you mean optim"):
        cl_train.train(lr=0.1)
    with pytest.raises(ConfigError, match=r"model= takes a name or package.module:function, not an object \(Linear\)"):
        cl_train.train(model=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="command line"):
        cl_train.train("-m", "seed=1,2")
    with pytest.raises(TrainingFault, match="the loss is nan"):
        cl_train.train("data=folder", **{**settings, "model": "tests.networks:nan_at_third_step"})
    assert main(["train", "data=folder", "epochs=0"]) == 2 and "epochs=0" in capsys.readouterr().err


def test_ctrl_c_is_raised_when_a_checkpoint_is_saved(settings: dict[str, object], tmp_path: Path) -> None:
    run = tmp_path / "run"

    def interrupt() -> None:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cl_train.train("data=folder", f"hydra.run.dir={run}", **{**settings, "epochs": 10_000})
    thread.join()
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    (saved,) = (run / "checkpoints").glob("step-*.pt")
    steps = int(saved.stem.partition("-")[2])
    words = ["data=folder", f"hydra.run.dir={run}", "resume=auto", f"max_steps={steps + 2}"]
    assert cl_train.train(*words, **{**settings, "epochs": 10_000}).summary["steps"] == steps + 2


@pytest.mark.slow
def test_the_notebook(cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cells; the last one is interrupted as Jupyter's stop button does, and the kernel lives on."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PATH", f"{sys.prefix}/share/jupyter")
    notebook = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 5 and not any(cell.outputs for cell in code)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert "Epoch: [0]" in printed and "top-1" in printed and "interrupted after" in printed
    assert "continued" in "".join(output.get("text", "") for output in code[-1].outputs)
