"""Sweeps: what is planned, and runs of a stand-in for train.py; tests/clusters runs the real program on Slurm."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cl_train.comparison import sweep as sweep_module
from cl_train.comparison.report import compare_folders
from cl_train.comparison.sweep import (
    LocalJobs,
    Slot,
    array_script,
    own_allocation,
    own_cores,
    plan_slots,
    run_sweep,
    signals_noted,
)
from cl_train.comparison.sweep_plan import LOG_NAME, Job, plan_sweep, problem_of, read_sweep
from cl_train.config.schema import ConfigError, LauncherConfig
from tests.processes import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("channels_last=true,false", "model=resnet18")
SLURM = ("-m", "channels_last=true,false", "launcher=slurm")

# Leaves the records of a run: channels_last=true is 1.5 times as fast. Some models misbehave until `mended` exists.
STAND_IN = """
import fcntl, json, os, pathlib, signal, sys, time
settings = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(settings["hydra.run.dir"].strip("'"))
model, mended = settings["model"], (pathlib.Path(__file__).parent / "mended").exists()
print(sys.argv, flush=True)
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    calls.write(folder.name + "\\n")
(folder / "place.json").write_text(json.dumps([time.time(), os.environ.get("CUDA_VISIBLE_DEVICES")]))
if model == "alexnet" and not mended:
    raise RuntimeError("the weights are not numbers")
if model == "vgg11" and not mended:
    os.kill(os.getpid(), signal.SIGKILL)
if model == "vgg13" and not mended:
    raise MemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
if model == "vgg16" and not mended:  # like the program, it locks its folder and needs time to end
    lock = open(folder / ".lock", "a")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(time.sleep(1) or 143))
    (folder / "ready.part").write_text(str(os.getpid()))
    (folder / "ready.part").rename(folder / "ready")
    time.sleep(10_000)
speed = 150 if settings["channels_last"] == "true" else 100
config = {"model": model, "channels_last": settings["channels_last"], "batch_size": 32}
config["precision"] = settings.get("precision", "bf16")
(folder / "config.yaml").write_text("\\n".join(f"{key}: {value}" for key, value in config.items()))
record = {"kind": "train", "loss": 1.0, "data_wait_pct": 1.0, "warmup": False, "time": time.time()}
lines = [json.dumps({**record, "step": step, "images_per_s": speed + step % 2}) for step in range(10)]
(folder / "metrics.jsonl").write_text("\\n".join(lines))
summary = {"status": "completed", "precision": config["precision"], "world_size": 1}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables_only: None) -> Path:
    """The program of jobs."""
    path = tmp_path / "program" / "stand_in.py"
    path.parent.mkdir()
    path.write_text(STAND_IN)
    monkeypatch.setattr(sweep_module, "PROGRAM", [str(path)])
    return path


def calls(stand_in: Path) -> list[str]:
    return (stand_in.parent / "calls").read_text().split()


def problems(folder: Path) -> dict[str, str | None]:
    """Of each job of the sweep in `folder`, by its name."""
    return {job.name: problem_of(folder / job.name) for job in read_sweep(folder).jobs}


def compared(folder: Path, key: str = "pairs") -> Any:
    return json.loads((folder / "comparison.json").read_text())[key]


def launch(stand_in: Path, folder: Path, models: str) -> "subprocess.Popen[str]":
    """A sweep of `models` in another process, when its job of vgg16 runs."""
    program = (
        f"import sys; from cl_train.comparison import sweep; sweep.PROGRAM = [{str(stand_in)!r}]; "
        f"sys.exit(sweep.run_sweep(['-m', 'channels_last=true', 'model={models}', 'hydra.sweep.dir={folder}']))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until((folder / "vgg16_channels_last" / "ready").exists)
    return process


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("channels_last=true,false repeats=2", "channels_last_1 contiguous_1 contiguous_2 channels_last_2"),
        ("nproc=1,2 batch_size=range(8,17,8)", "=1_batch_size=8 =1_batch_size=16 =2_batch_size=8 =2_batch_size=16"),
        ("precision=bf16,fp32 compare_by=precision", "resnet18_contiguous_bf16 resnet18_contiguous_fp32"),
        ("weights=a/b.pth,a_b.pth", "a_b.pth a_b.pth-2"),
        ("model=choice(resnet18,tests.networks:small)", "resnet18_contiguous tests.networks.small_contiguous"),
        (f"data.root='/a/path/{'x' * 200}',/b", "-52419fa5 =_b"),
    ],
)
def test_the_names_of_jobs(words: str, ends: str) -> None:
    planned = plan_sweep(["-m", *words.split(), "epochs=2"])
    assert planned.folder.parent == Path("multirun")
    assert [job.name.endswith(end) for job, end in zip(planned.jobs, ends.split(), strict=True)].count(False) == 0
    assert all(len(job.name) <= 100 and "/" not in job.name for job in planned.jobs)
    assert not any(word.startswith("nproc") for job in planned.jobs for word in job.overrides)


@pytest.mark.parametrize("compared", ["channels_last=true,false", "schedule=cosine,linear compare_by=schedule.name"])
def test_jobs_that_are_compared_are_adjacent_and_alternate(compared: str) -> None:
    planned = plan_sweep(["-m", "model=resnet18,alexnet", *compared.split(), "repeats=2", "epochs=2", "select=[]"])
    assert [job.group for job in planned.jobs] == [0] * 4 + [1] * 4
    key, one, other = compared.split()[0].replace(",", "=").split("=")
    sides = [["epochs=2", "select=[]", f"{key}={value}", "model=resnet18"] for value in (one, other, other, one)]
    assert [job.overrides for job in planned.jobs[:4]] == sides
    assert all(job.name.startswith(job.overrides[-1].removeprefix("model=")) for job in planned.jobs)


@pytest.mark.slow
def test_a_setting_that_is_the_same_in_all_jobs_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """With the setting to compare by instead; not where a sweep compares its own setting, or has one job."""
    cases = {
        "optim.lr=0.1,0.2": "compare_by=optim.lr",
        "optim=sgd,adamw": "compare_by=optim.name",
        "nproc=1,2": "compare_by=nproc",
        "seed=1,2 compare_by=precision": "compare_by=seed",
        "seed=1,2 channels_last=true,false": "",
        "repeats=2": "",
        "augment=basic,strong compare_by=augment.flip": "",
    }
    for words, expected in cases.items():
        plan_sweep(["-m", *words.split()])
        output = capsys.readouterr().out
        assert expected in output and bool(expected) == bool(output), words


SHORT = (
    "data=synthetic max_steps=20",  # one window of ten steps after ten of warm-up
    "data=synthetic data.synthetic_images=320 epochs=4",  # ten steps an epoch, the first is warm-up
    "data=sample epochs=1 batch_size=32",  # 34 steps: 10 to 20, to 30, to 34
    "data=folder data.root=/nowhere max_steps=40",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", SHORT)
def test_runs_that_are_not_compared_or_one_window_longer_are_accepted(words: str) -> None:
    assert plan_sweep(["-m", "seed=1,2", *words.split()]).jobs
    longer = [word for word in words.split() if not word.startswith(("epochs", "max_steps"))]
    assert plan_sweep(["-m", "channels_last=true,false", *longer, "epochs=5", "max_steps=50"]).jobs


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("channels_last=true,false model=resnet50 resume_sweep={sweep}", "resume_sweep"),
        ("compare_by=precision resume_sweep={sweep}", "resume_sweep"),
        ("channels_last=true,false hydra.sweep.dir={sweep}", "resume_sweep"),
        ("resume_sweep={sweep}/..", "sweep.json"),
        ("seed=1,2 only_group=1", "only_group needs resume_sweep"),
        ("channels_last=false,false", "listed twice .channels_last=false"),
        *((f"channels_last=true,false {words}", "log_every") for words in SHORT),
        ("channels_last=true,false launcher.gpus=all hydra.sweep.dir={sweep}/new", "launcher.gpus"),
    ],
)
def test_what_is_refused(words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_sweep(["-m", *LAYOUTS, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    planned.folder.mkdir()
    planned.save()
    monkeypatch.setattr(sweep_module, "visible_gpus", list)
    with pytest.raises(ConfigError, match=named):
        run_sweep(["-m", *words.format(sweep=planned.folder).split()])
    assert not (planned.folder / "new").exists()


def test_under_torchrun_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ["RANK=1", "LOCAL_RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=29500"]:
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(ConfigError, match="nproc=N"):
        run_sweep(["-m", "channels_last=true,false"])


@pytest.mark.parametrize(("name", "is_read"), [("a", True), ("../precious", False), ("a/b", False), ("", False)])
def test_a_record_of_an_earlier_version_can_be_read_but_names_no_other_folders(
    tmp_path: Path, name: str, is_read: bool
) -> None:
    jobs = [{"number": 0, "name": name, "overrides": [], "status": "failed", "exit_code": 1, "why": "x"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"compare_by": "seed", "allocations": {}, "jobs": jobs}))
    with nullcontext() if is_read else pytest.raises(ConfigError):
        found = read_sweep(tmp_path)
        assert found.launcher == LauncherConfig() and [job.name for job in found.jobs] == [name]


@pytest.mark.slow
def test_compare_and_the_sweep_reach_the_same_verdict(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    assert run_sweep(["-m", *LAYOUTS, f"hydra.sweep.dir={folder}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, "one line for the sweep, one per job and the verdict"
    assert "resnet18_channels_last: completed" in lines[1] and "150.5 images/s" in lines[1]
    assert "left" in lines[1], "an estimate of the time left"
    assert lines[-1].startswith("resnet18 (bf16): ") and lines[-1].endswith(f"Report: {folder}/comparison.md")
    [by_sweep] = compared(folder)
    assert (by_sweep["baseline"], by_sweep["candidate"]) == ("contiguous", "channels_last")
    assert by_sweep["verdict"] == "faster" and by_sweep["ratio"] == pytest.approx(1.5, rel=0.02)
    runs = [folder / f"resnet18_{layout}" for layout in ("contiguous", "channels_last")]
    for folders in ([folder], runs, runs[::-1]):
        compare_folders(folders, out=tmp_path / "report")
        assert compared(tmp_path / "report") == [by_sweep]
    shutil.rmtree(runs[0])  # what is lost or damaged afterwards runs again
    for damaged in (None, "metrics.jsonl", "summary.json"):
        if damaged:
            (runs[0] / damaged).write_text("garbage\n{\n")
        assert problem_of(runs[0]) is not None
        (stand_in.parent / "calls").unlink()
        assert run_sweep(["-m", f"resume_sweep={folder}"]) == 0
        assert calls(stand_in) == [runs[0].name] and len(compared(folder)) == 1


@pytest.mark.slow
def test_bad_jobs_do_not_stop_the_others_and_are_run_again(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    words = ["channels_last=true", "model=resnet18,alexnet,vgg11,vgg13,resnet50"]
    assert run_sweep(["-m", *words, f"hydra.sweep.dir={folder}"]) == 1
    jobs = {name.partition("_")[0]: str(why) for name, why in problems(folder).items()}
    assert [name for name, why in jobs.items() if why == "None"] == ["resnet18", "resnet50"]
    assert jobs["alexnet"] == "RuntimeError: the weights are not numbers (exit code 1)"
    assert jobs["vgg11"].startswith("killed by SIGKILL")
    assert jobs["vgg13"].startswith("MemoryError: DefaultCPU")
    assert [entry["job"] for entry in compared(folder, "failed")] == [1, 2, 3]
    assert "killed by SIGKILL" in (folder / "comparison.md").read_text()
    verdict, resume = capsys.readouterr().out.splitlines()[-2:]
    assert "3 jobs did not finish" in verdict and f"resume_sweep={folder} runs what is missing" in resume

    (stand_in.parent / "mended").touch()
    (stand_in.parent / "calls").unlink()
    assert run_sweep(["-m", f"resume_sweep={folder}"]) == 0
    assert calls(stand_in) == ["alexnet_channels_last", "vgg11_channels_last", "vgg13_channels_last"]
    assert set(problems(folder).values()) == {None}
    assert compared(folder, "failed") == []


@pytest.mark.slow
def test_a_sweep_by_another_key_deletes_nothing(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "resnet18_contiguous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    with pytest.raises(ConfigError, match="resnet18_contiguous"):
        run_sweep(["-m", f"hydra.sweep.dir={tmp_path}"])
    words = ["model=resnet18", "channels_last=true", "precision=bf16,fp32"]
    assert run_sweep(["-m", *words, f"hydra.sweep.dir={tmp_path}"]) == 0
    assert "compare_by=precision" in capsys.readouterr().out.splitlines()[0], "before the start"
    assert compare_folders([tmp_path]).pairs == [], "one layout only"
    assert "compare_by=precision" in capsys.readouterr().out
    [pair] = compare_folders([tmp_path], "precision").pairs
    assert (pair.baseline, pair.candidate) == ("precision=fp32", "precision=bf16")
    (tmp_path / "sweep.json").rename(tmp_path / "earlier.json")
    assert run_sweep(["-m", "model=resnet34", "channels_last=true", f"hydra.sweep.dir={tmp_path}"]) == 0, "without axes"
    assert problem_of(tmp_path / "resnet34_channels_last") is None
    assert len(list(tmp_path.glob("*/precious"))) == 2


@pytest.mark.slow
def test_resuming_uses_only_folders_that_the_sweep_has_started(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One has a log alone, one a checkpoint and the batch size that was measured, one is of somebody else."""
    words = ["channels_last=true,false", "model=resnet18,resnet34", "batch_size=auto"]
    planned = plan_sweep(["-m", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    started, saved, foreign, _ = (planned.folder / job.name for job in planned.jobs)
    for folder in (started, saved / "checkpoints", foreign):
        folder.mkdir(parents=True)
    (started / LOG_NAME).touch()
    (saved / LOG_NAME).touch()
    (saved / "checkpoints" / "step-1.pt").touch()
    (saved / "config.yaml").write_text("model: resnet18\nbatch_size: 96\n")
    planned.save()
    assert run_sweep(["-m", f"resume_sweep={planned.folder}"]) == 1
    assert problem_of(started) is None and "'overwrite=true'" in (started / LOG_NAME).read_text()
    assert "'batch_size=96', 'resume=auto'" in (saved / LOG_NAME).read_text()
    assert not any(foreign.iterdir())
    assert f"failed ({foreign} exists already" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_are_started_by_torchrun(stand_in: Path, tmp_path: Path) -> None:
    stand_in.write_text(
        'import os; os.write(1, f\'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    )
    [job] = plan_sweep(["-m", "nproc=2", "model=resnet18", f"hydra.sweep.dir={tmp_path / 'sweep'}"]).jobs
    assert LocalJobs(tmp_path, [[job]], [Slot()]).run() == 0
    log = (tmp_path / job.name / LOG_NAME).read_text()
    assert "rank 0 of 2" in log and "rank 1 of 2" in log


def test_signals_are_noted_but_not_sighup_under_nohup() -> None:
    nohup, before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    received: list[int] = []
    try:
        with signals_noted([signal.SIGTERM, signal.SIGHUP], received):
            for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):  # Slurm sends SIGTERM more than once
                signal.raise_signal(signum)
    finally:
        signal.signal(signal.SIGHUP, nohup)
    assert received == [signal.SIGTERM] * 2 and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_still_writes_the_report(stand_in: Path, tmp_path: Path, signum: int) -> None:
    folder = tmp_path / "sweep"
    process = launch(stand_in, folder, "resnet18,vgg16,resnet34")
    process.send_signal(signum)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum
    done, interrupted, pending = problems(folder).values()
    assert done is None and pending == "has not run" and str(interrupted).startswith("interrupted, stopped by SIG")
    assert "stopped by SIG" in output and "resume_sweep=" in output
    assert len(compared(folder, "failed")) == 2


@pytest.mark.slow
def test_a_killed_launcher_takes_its_job_along_and_can_be_resumed(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming is refused while the launcher runs, and waits for a job that is still ending."""
    folder = tmp_path / "sweep"
    with launch(stand_in, folder, "vgg16,resnet18") as launcher:
        with pytest.raises(ConfigError, match=str(launcher.pid)):
            run_sweep(["-m", f"resume_sweep={folder}"])
        launcher.kill()
    (stand_in.parent / "mended").touch()
    assert run_sweep(["-m", f"resume_sweep={folder}"]) == 0
    assert "waiting for the end of an earlier vgg16_channels_last" in capsys.readouterr().err
    assert set(problems(folder).values()) == {None}


@pytest.mark.slow
def test_pairs_stay_on_one_gpu_and_alternate(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPU slots take the place of GPUs. A job begins when the other GPU has had one."""
    both_run = (
        "end = time.monotonic() + 300\n"
        'while len({p.read_text()[-6:] for p in folder.parent.glob("*/place.json")}) < 2:\n'
        "    assert time.monotonic() < end\n"
        "    time.sleep(0.01)\n"
        "assert os.sched_getaffinity(0) == {0, 1}\n"
    )
    stand_in.write_text(STAND_IN.replace('if model == "alexnet"', f'{both_run}if model == "alexnet"'))
    monkeypatch.setattr(sweep_module, "own_cores", lambda: [0, 1] * 2)
    monkeypatch.setattr(sweep_module, "visible_gpus", lambda: ["0", "1"])
    words = ["channels_last=true,false", "model=resnet18,resnet34", "repeats=2", "data=synthetic", "launcher.gpus=0,1"]
    assert run_sweep(["-m", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    used = []
    for model in ("resnet18", "resnet34"):
        places = tmp_path.glob(f"sweep/{model}_*/place.json")
        jobs = sorted((*json.loads(path.read_text()), path.parent.name.removeprefix(f"{model}_")) for path in places)
        assert [name for *_, name in jobs] == ["channels_last_1", "contiguous_1", "contiguous_2", "channels_last_2"]
        assert len({gpu for _, gpu, _ in jobs}) == 1, "a pair stays on one GPU"
        used.append(jobs[0][1])
    assert set(used) == {"0", "1"}
    assert {pair["verdict"] for pair in compared(tmp_path / "sweep")} == {"faster"}


def job(*words: str, nproc: int = 1) -> Job:
    return Job(0, "a", list(words), nproc)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    cores = list(range(16))
    monkeypatch.setattr(sweep_module, "own_cores", lambda: cores)
    return cores


def test_gpus_and_cores_are_divided(cores: list[int]) -> None:
    gpus = ["0", "1", "2", "3"]
    assert plan_slots(["all"], gpus, [[job()]] * 4) == [
        Slot((str(i),), tuple(cores[4 * i : 4 * i + 4])) for i in range(4)
    ]
    assert plan_slots(["all"], gpus[:3], [[job(), job(nproc=2)]] * 2) == [Slot(("0", "1"), tuple(cores))]
    assert [len(slot.cores) for slot in plan_slots(["all"], gpus, [[job()]] * 2)] == [8, 8], "one per group"
    assert [slot.gpus for slot in plan_slots(["5"], ["2", "5"], [[job()]])] == [("5",)]
    del cores[2:]
    assert len(plan_slots(["all"], gpus[:2], [[job("data=synthetic")]] * 2)) == 2, "no loader"
    assert len(set(own_cores())) == len(own_cores()) > 0


@pytest.mark.parametrize(
    ("asked", "visible", "count", "settings", "word"),
    [
        ("all", "0,1,2,3", 7, job(), "cores"),  # one core per job: none for its loader
        ("all", "0,1", 16, job("data.workers=9"), "data.workers"),
        ("all", "0,1", 7, job("data.workers=4", nproc=2), "cores"),
        ("all", "0", 16, job(nproc=2), "nproc"),
        ("all", "0,1", 16, job("device=cpu"), "device=cpu"),
        ("0", "2,5", 16, job(), "2,5"),
        ("2,2", "2,5", 16, job(), "each once"),
    ],
)
def test_what_cannot_work_is_refused(
    asked: str, visible: str, count: int, settings: Job, word: str, cores: list[int]
) -> None:
    del cores[count:]
    with pytest.raises(ConfigError, match=word):
        plan_slots(asked.split(","), visible.split(","), [[settings]] * 4)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that refuses everything, and a squeue that knows of nothing."""
    bodies, run = {"sbatch": "echo 'invalid partition' >&2; exit 1", "squeue": "exit 0"}, subprocess.run

    def start(command: list[str], **words: Any) -> Any:
        return run(["sh", "-c", bodies[command[0]]] if command[0] in bodies else command, **words)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", start)


@pytest.mark.parametrize(
    ("nproc", "changes", "expected"),
    [
        (1, {}, ["--array=0,1\n", "--time=30\n", "--signal=B:USR2@120", "--ntasks-per-node=1\n", "only_group="]),
        (1, {"max_parallel": 1, "time_min": 1}, ["=0,1%1\n", "USR2@20"]),
        (8, {"nodes": 2, "cpus_per_task": 4}, ["-node=4\n", "--cpus-per-task=4\n"]),
        (8, {"cpus_per_task": 4, "gpus_per_node": 8}, ["--cpus-per-task=32\n", "--gpus-per-node=8\n"]),
        (1, {"partition": "gpu", "setup": ["module load cuda"]}, ["--partition=gpu\n", "\nmodule load cuda\n"]),
    ],
)
def test_jobs_that_are_compared_form_one_element_of_an_array(
    nproc: int, changes: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    words = ["seed=1,2", "launcher.time_min=30", f"nproc={nproc}", "epochs=50", f"hydra.sweep.dir={tmp_path}"]
    planned = plan_sweep([*SLURM, *words])
    script = array_script(replace(planned, launcher=replace(planned.launcher, **changes)), [0, 1])
    assert [words for words in expected if words not in script] == []
    assert [[job.number for job in group] for group in planned.missing_groups()] == [[0, 1], [2, 3]]
    assert not any("launcher" in word for job in planned.jobs for word in job.overrides)
    planned.save()
    assert read_sweep(planned.folder) == planned
    [[first, _]] = plan_sweep(["-m", f"resume_sweep={planned.folder}", "only_group=1"]).missing_groups()
    assert first.number == 2


@pytest.mark.parametrize(
    ("array", "name"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1")]
)
def test_an_element_of_an_array_is_not_the_array(
    array: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_JOB_ID of the last element is the id of the array."""
    monkeypatch.setattr(os, "environ", {"SLURM_JOB_ID": "7"} | array)
    assert own_allocation() == name


def test_without_slurm_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="no sbatch"):
        run_sweep([*SLURM, f"hydra.sweep.dir={tmp_path}/a"])
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("word", "is_warned"), [("epochs=5", True), ("device=cpu", False), ("launcher.gpus_per_node=1", False)]
)
def test_what_sbatch_refuses_can_be_submitted_again(
    word: str, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No request for GPUs is reported, and processes are spread evenly."""
    with pytest.raises(ConfigError, match=r"launcher\.nodes=2"):
        run_sweep([*SLURM, "launcher.nodes=2", f"hydra.sweep.dir={tmp_path}/a"])
    with pytest.raises(ConfigError, match=r"invalid partition; resume_sweep="):
        run_sweep([*SLURM, word, f"hydra.sweep.dir={tmp_path}/a"])
    assert ("launcher.gpus_per_node" in capsys.readouterr().out) == is_warned
    assert len(read_sweep(tmp_path / "a").missing_groups()) == 1
