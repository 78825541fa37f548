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
from cl_train.commands import train as train_command
from cl_train.errors import ConfigError, TrainingFault
from tests.data.user_datasets import uint8
from tests.networks import small

ROOT = Path(__file__).resolve().parents[2]
TINY = {"device": "cpu", "precision": "fp32", "batch_size": 16, "epochs": 1}
TINY |= {"data": {"image_size": 32, "workers": 0}}
TINY |= {"model": "tests.networks:small", "log_every": 1, "warmup_steps": 1, "log_to": []}


@pytest.fixture
def settings(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    return TINY | {"data": {**TINY["data"], "root": image_folder}}


@pytest.fixture(autouse=True)
def of_a_terminal():
    """A shell that starts pytest in the background makes it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_two_runs_in_one_process(settings, tmp_path):
    settings |= {"log_to": ["tensorboard"]}
    first = cl_train.train("data=folder", "channels_last=true", **settings)
    second = cl_train.train("data=folder", f"hydra.run.dir={tmp_path}/b", **settings)
    assert first.folder.is_relative_to(tmp_path / "outputs") and second.folder == tmp_path / "b"
    for result, layout in ((first, "channels_last"), (second, "contiguous")):
        assert result.summary == json.loads((result.folder / "summary.json").read_text())
        assert result.summary["memory_format"] == layout
        assert result.summary["command"].startswith("cl_train.train('data=folder'")
        assert result.top1 == result.summary["val"]["top1"] and result.exit_code == 0
        logdir = first.folder.parent if result is first else second.folder
        said = f"curves: tensorboard --logdir {logdir.relative_to(tmp_path)}\n"
        assert said in (result.folder / "train.log").read_text()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_settings_of_a_run_are_reused(settings, tmp_path):
    first = cl_train.train(
        "data=folder", f"hydra.run.dir={tmp_path}/a", "optim=adamw", "optim.lr=1e-3", **settings
    )
    model = settings["model"]  # code, which a run folder alone does not start
    words = ("seed=1", f"hydra.run.dir={tmp_path}/b")
    again = cl_train.train(f"config={first.folder}", *words, model=model)
    evaluated = cl_train.train("evaluate_only=true", resume=first.folder, model=model, batch_size=5)
    assert again.summary["train"] != first.summary["train"]
    config = (again.folder / "config.yaml").read_text()
    assert "name: adamw\n  lr: 0.001\n" in config and "seed: 1\n" in config
    assert evaluated.top1 == first.top1 and evaluated.folder != first.folder


def test_faults_are_raised(settings, capsys):
    with pytest.raises(ConfigError, match="did you mean optim"):
        cl_train.train(lr=0.1)
    with pytest.raises(ConfigError, match=r"did you mean .*resnet50"):  # before the data is read
        cl_train.train("model=resnt50", "data.root=/nowhere")
    with pytest.raises(ConfigError, match="command line"):
        cl_train.train("-m", "seed=1,2")
    with pytest.raises(TrainingFault, match="the loss is nan"):
        cl_train.train("data=folder", **{**settings, "model": "tests.networks:nan_at_third_step"})
    assert main(["train", "data=folder", "epochs=0"]) == 2 and "epochs=0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_notebook(cache_home, tmp_path, monkeypatch):
    """Its cells run, shortened; the file holds the outputs of the whole. In the last cell Ctrl-C is
    raised when a checkpoint is saved, and the run continues.
    """
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PATH", f"{sys.prefix}/share/jupyter")
    notebook = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code)
    small = 'model="squeezenet1_1", parity=False, max_steps=2'
    for whole, short in (
        ("epochs=3", small),
        ("assert run.top1 > 95", ""),
        ("time_limit_s=1", "time_limit_s=0.1"),  # of 10 and 15
        ("randn(32", "randn(2"),
        ('"epochs": 3', '"parity": False, "max_steps": 2'),
        ('"experiment=smoke"', '"experiment=smoke", "parity=false"'),
    ):
        assert any(whole in cell.source for cell in code)
        for cell in code:
            cell.source = cell.source.replace(whole, short)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = "top-1|image/png|image/png|verdict|saves|shufflenet|weights channels_last|continued"
    for cell, text in zip(code, texts.split("|"), strict=True):
        assert text in str(cell.outputs)


def test_it_trains_in_another_thread_and_in_one_at_a_time(settings, tmp_path):
    done = []

    def work():
        run = cl_train.train(f"hydra.run.dir={tmp_path}/run", "data=folder", **settings)
        done.append(run.summary["status"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["completed"]
    with train_command._train_lock, pytest.raises(ConfigError, match="another thread"):
        cl_train.train(f"hydra.run.dir={tmp_path}/refused", "data=folder", **settings)
    assert not (tmp_path / "refused").exists(), "it has claimed nothing"


DATASETS = uint8("train", 32), uint8("val", 32)
NOISE = TINY | {"data": DATASETS, "data.image_size": 32, "data.workers": 0}


def test_objects_take_the_place_of_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = small(num_classes=3)
    weight = model.get_submodule("0").weight
    before = weight.clone()
    losses = []

    def loss(logits, targets):
        losses.append(len(targets))
        return torch.nn.functional.cross_entropy(logits, targets)

    settings = NOISE | {"model": model, "loss": loss}
    run = cl_train.train(channels_last=True, verbose=False, **settings)
    assert capsys.readouterr().out == "" and "Epoch: [0]" in (run.folder / "train.log").read_text()
    assert [record["kind"] for record in run.history] == ["train", "val"]
    assert run.history[-1]["top1"] == run.top1 and sum(losses) >= 16
    assert not torch.equal(weight, before) and cl_train.classify(weight) == "channels_last"


@pytest.mark.parametrize("wrong", [{"data": DATASETS[0]}, {"epochs": print}, {"seed": uint8}])
def test_objects_where_a_setting_takes_none(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cl_train.train(**wrong)


def test_a_model_may_be_a_class_or_a_function_and_one_that_exits_does_not_end_us(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    class Network(torch.nn.Sequential):
        def __init__(self, num_classes):
            super().__init__(small(num_classes))

    class Exits(torch.nn.Identity):
        def forward(self, x):
            sys.exit("done")

    def trained(model):
        return cl_train.train(verbose=False, **NOISE | {"max_steps": 1, "model": model})

    assert trained(Network).top1 is not None
    assert trained(lambda num_classes: small(num_classes)).top1 is not None
    with pytest.raises(TrainingFault, match=r"sys\.exit\(done\)"):
        trained(torch.nn.Sequential(small(3), Exits()))
    assert trained(small(3)).top1 is not None, "the lock is free"
