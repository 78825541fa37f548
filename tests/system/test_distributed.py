"""Two processes under torchrun, on gloo: the same weights as one process, exact evaluation, one run folder."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from cl_train.config.command_line import check_command_line
from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.build import build_data
from cl_train.data.device import DeviceFormat
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import Dist, processes
from cl_train.training import loop
from cl_train.training.evaluation import evaluate_model
from tests.conftest import write_images
from tests.faults.forkserver import ForkServer
from tests.networks import without_batchnorm
from tests.processes import LIMIT_S
from tests.ranks import TINY, fork_two_ranks, launch


def train(processes: int, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return launch(processes, "train.py", *TINY, f"hydra.run.dir={folder}", *overrides)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = max((folder / "checkpoints").glob("step-*.pt"))
    return torch.load(path, weights_only=True)["model"]


@pytest.mark.slow
def test_two_processes_train_like_one(image_folder: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """The second pair of processes is forked: one start of torchrun is enough."""
    (tmp_path / "one").mkdir()
    shared = [f"data.root={image_folder}", "epochs=2", "channels_last=true"]
    (cfg,) = check_command_line([*TINY, "batch_size=32", *shared])
    assert loop.train(cfg, tmp_path / "one").exit_code == 0
    two = train(2, tmp_path / "two", "batch_size=16", "log_to=[tensorboard]", *shared)
    assert two.returncode == 0, two.stdout + two.stderr
    words = [*TINY, f"hydra.run.dir={tmp_path}/accumulated", "batch_size=8", "global_batch_size=32", *shared]
    fork_two_ranks(fork_server, tmp_path, "forkserver:run_program", {"words": words, "hook": ""})
    expected = weights(tmp_path / "one")
    for name in ("two", "accumulated"):
        for key, value in weights(tmp_path / name).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert (summary["world_size"], summary["global_batch_size"], summary["val"]["images"]) == (2, 32, 21)
    assert two.stdout.count("Epoch: [0][1/3]") == 1, "rank 0 alone speaks"
    assert len(list((tmp_path / "two").glob("events*"))) == 1


@pytest.mark.slow
def test_evaluation_counts_each_image_once(tmp_path: Path, fork_server: ForkServer) -> None:
    """Images that split unevenly over ranks and batches: counted as one process counts them."""
    expected = {}
    for images in (7, 97, 101):
        write_unevenly(tmp_path / str(images), images)
        for batch_size in (1, 4, 16):
            expected[f"{images}-{batch_size}"] = evaluate_folder(tmp_path / str(images), batch_size, ONE_PROCESS)
    ranks = fork_two_ranks(fork_server, tmp_path, "tests.system.test_distributed:main", str(tmp_path))
    found = json.loads(ranks[0].output().splitlines()[-1])
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert found[name]["images"] == result["images"] == int(name.split("-")[0])
        assert found[name] == pytest.approx(result, rel=1e-6), name


ONE_PROCESS = Dist(0, 1, torch.device("cpu"))


def write_unevenly(root: Path, images: int) -> None:
    write_images(root, {"train": 12, "val": images // 3 + 1})
    for extra in sorted((root / "val" / "red").iterdir())[: 3 * (images // 3 + 1) - images]:
        extra.unlink()


def evaluate_folder(root: Path, batch_size: int, dist: Dist) -> dict[str, float]:
    torch.manual_seed(0)
    model = without_batchnorm(3)
    cfg = DataConfig(name="folder", root=str(root), image_size=32, workers=0)
    data = build_data(cfg, AugmentConfig(), batch_size=batch_size, seed=0, dist=dist)
    form = DeviceFormat(dist.device, torch.float32, torch.channels_last)
    try:
        return evaluate_model(model, data, form, resolve_precision("fp32", dist.device), dist)[0]
    finally:
        data.close()


def main(folder: str) -> None:
    """What each of the two processes runs: every case, then rank 0 prints the results."""
    with processes("cpu", timeout_s=LIMIT_S) as dist:
        cases = [(images, batch_size) for images in (7, 97, 101) for batch_size in (1, 4, 16)]
        results = {f"{n}-{size}": evaluate_folder(Path(folder) / str(n), size, dist) for n, size in cases}
        if dist.is_main:
            print(json.dumps(results))


@pytest.mark.slow
def test_multirun_under_torchrun_is_refused_with_the_right_command(tmp_path: Path, fork_server: ForkServer) -> None:
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    words = ["-m", *TINY, f"hydra.sweep.dir={tmp_path / 'run'}", "channels_last=true,false", "data=sample"]
    refused = fork_server.start(words, tmp_path / "log", torchrun)
    assert refused.wait() == 2
    assert "nproc=" in refused.output() and "python train.py -m" in refused.output()
    assert not (tmp_path / "run").exists()
