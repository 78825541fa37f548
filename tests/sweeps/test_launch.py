"""Sweeps: runs of a stand-in for train.py."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from cl_train.commands.train import main
from cl_train.errors import ConfigError
from cl_train.sweeps import job as job_module
from cl_train.sweeps import launch as sweep_module
from cl_train.sweeps import places as places_module
from cl_train.sweeps.job import LOG_NAME, outcome_of, start_job
from cl_train.sweeps.launch import run_sweep
from cl_train.sweeps.places import Place
from cl_train.sweeps.plan import Job, plan_sweep, read_sweep
from cl_train.sweeps.report import compare_folders
from cl_train.system import files
from cl_train.system.run_folder import SUMMARY
from tests.processes import LIMIT_S, wait_until
from tests.sweeps.run_folders import folder_of
from tests.sweeps.test_plan import BOTH, runs_of, saved_plan

ROOT = Path(__file__).resolve().parents[2]

# Leaves the records of a run. One of vgg16 waits for a signal until `mended` exists.
STAND_IN = """
import fcntl, os, pathlib, signal, sys, time
from tests.sweeps.run_folders import folder_of
settings = dict(word.split("=", 1) for word in sys.argv[1:])
folder, here = pathlib.Path(settings["hydra.run.dir"].strip("'")), pathlib.Path(__file__).parent
print(sys.argv, flush=True)
with open(here / "calls", "a") as calls:
    print(folder.name, os.environ.get("CUDA_VISIBLE_DEVICES", "-"), file=calls)
def end(*_):  # as long as the program saves
    while not (here / "saved").exists():
        time.sleep(0.01)
    os._exit(143)
if settings["model"] == "vgg16" and not (here / "mended").exists():
    lock = open(folder / ".lock", "a")  # like the program, and it needs time to end
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.signal(signal.SIGTERM, end)
    (folder / "ready").touch()
    time.sleep(10_000)
given = ("model", "channels_last", "environment")
values = {name: settings[name].strip("'") for name in given if name in settings}
speed = 150 if settings["channels_last"] == "true" else float(os.environ.get("SPEED", 100))
run = folder_of(speed, started_at=time.time(), **{"environment": "here"} | values)
run.summary["environment"]["torch"] = os.environ.get("TORCH", "2.15.0")
run.write(folder)
"""


@dataclass
class Planted:
    """What the next jobs do, which end at once, without a process."""

    ran: list[str] = field(default_factory=list)  # names of jobs
    noise_pct: list[float] = field(default_factory=list)  # of the speeds of the next jobs
    disturbed: int = 0  # so many of the next jobs, by other processes
    exits: dict[str, int] = field(default_factory=dict)  # exit codes by model

    def start(self, job, folder, place):
        settings = dict(word.split("=", 1) for word in job.overrides)
        self.ran.append(job.name)
        folder.mkdir(exist_ok=True)
        exit_code = self.exits.get(settings["model"], 0)
        if exit_code:
            (folder / LOG_NAME).write_text("starts\nMemoryError: can't allocate\nends\n")
        else:
            speed = 150 if settings["channels_last"] == "true" else 100
            speed *= 1 + (self.noise_pct.pop(0) / 100 if self.noise_pct else 0)
            values = {key: settings[key] for key in ("model", "channels_last")}
            run = folder_of(speed, started_at=time.time(), **values)
            run.summary["lost_pct"] = 60.0 if self.disturbed else 1.0
            run.write(folder)
        self.disturbed = max(0, self.disturbed - 1)
        return SimpleNamespace(wait=lambda timeout: exit_code)


@pytest.fixture
def planted(monkeypatch, tables_only):
    planted = Planted()
    monkeypatch.setattr(sweep_module, "start_job", planted.start)
    return planted


@pytest.fixture
def stand_in(tmp_path, monkeypatch, tables_only):
    path = tmp_path / "program" / "stand_in.py"
    path.parent.mkdir()
    path.write_text(STAND_IN)
    monkeypatch.setattr(job_module, "PROGRAM", [str(path)])
    return path


def calls(stand_in):
    """The jobs in the order of their starts, and the GPUs of each."""
    return dict(line.split() for line in (stand_in.parent / "calls").read_text().splitlines())


def problems(folder):
    """Why each job of the sweep in `folder` is not completed; None if it is."""
    outcomes = [outcome_of(folder / job.name) for job in read_sweep(folder).jobs]
    return [outcome if isinstance(outcome, str) else None for outcome in outcomes]


def sweep(folder, *words):
    return run_sweep(runs_of(f"hydra.sweep.dir={folder}", *words))[1]


def resume(folder, *words):
    return run_sweep(runs_of(f"resume_sweep={folder}", *words))[1]


def compared(folder, key="pairs"):
    return json.loads((folder / "comparison.json").read_text())[key]


def launch(stand_in, folder, models):
    """A sweep of `models` in another process, when its job of vgg16 runs."""
    program = (
        "import sys; from cl_train.sweeps import job, launch as sweep, report; "
        f"job.PROGRAM = [{str(stand_in)!r}]; "
        "report.write_chart = lambda *_: False; "
        "from tests.sweeps.test_plan import runs_of; "
        f"runs = runs_of('channels_last=true', 'model={models}', 'hydra.sweep.dir={folder}'); "
        "sys.exit(sweep.run_sweep(runs)[1])"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until((folder / "vgg16_channels_last" / "ready").exists)
    return process


def test_compare_and_the_sweep_reach_the_same_verdict(planted, folder, tmp_path, capsys):
    assert sweep(folder, BOTH, "model=resnet18") == 0
    _, first, _, verdict, report = capsys.readouterr().out.splitlines()
    assert "resnet18_channels_last: completed" in first and "150.0 images/s" in first
    assert "left" in first, "an estimate of the time left"
    assert verdict.startswith("resnet18 (bf16): ") and report == f"Report: {folder}/comparison.md"
    [by_sweep] = compared(folder)
    assert by_sweep["verdict"] == "faster" and by_sweep["ratio"] == pytest.approx(1.5, rel=0.02)
    runs = [folder / f"resnet18_{layout}" for layout in ("contiguous", "channels_last")]
    for folders in ([folder], runs[::-1]):
        compare_folders(folders, out=tmp_path / "report")
        assert compared(tmp_path / "report") == [by_sweep]
    assert compare_folders([folder], "precision").pairs == [], "one precision only"
    for damaged in ("metrics.jsonl", "summary.json"):  # a run that is damaged afterwards runs again
        planted.ran.clear()
        (runs[0] / damaged).write_text("garbage\n{\n")
        assert resume(folder) == 0
        assert planted.ran == [runs[0].name] and len(compared(folder)) == 1


def test_bad_jobs_do_not_stop_the_others_and_are_run_again(planted, folder, capsys):
    planted.exits = {"alexnet": 1, "vgg11": -signal.SIGKILL}
    assert sweep(folder, "channels_last=true", "model=resnet18,alexnet,vgg11,resnet50") == 1
    first, raised, killed, last = problems(folder)
    assert first is None and last is None
    assert raised == "MemoryError: can't allocate (exit code 1)"
    assert str(killed).startswith("killed by SIGKILL")
    assert [entry["job"] for entry in compared(folder, "failed")] == [1, 2]
    assert "killed by SIGKILL" in (folder / "comparison.md").read_text()
    verdict, _, continued = capsys.readouterr().out.splitlines()[-3:]
    assert "2 jobs did not finish" in verdict
    assert f"resume_sweep={folder} runs what is missing" in continued
    planted.ran, planted.exits = [], {}
    assert resume(folder) == 0
    assert planted.ran == ["alexnet_channels_last", "vgg11_channels_last"]
    assert compared(folder, "failed") == []


@pytest.mark.slow
def test_resuming_uses_only_folders_that_the_sweep_has_started(stand_in, folder, capsys):
    """One has a log alone, one a checkpoint, one is somebody else's, and one completed, but it is
    damaged.
    """
    planned = saved_plan(folder, "model=resnet18,resnet34")
    started, saved, foreign, ended = (folder / job.name for job in planned.jobs)
    for path in (started, saved / "checkpoints", foreign, ended / "checkpoints"):
        path.mkdir(parents=True)
    for path in (started, saved, ended):
        (path / LOG_NAME).touch()
    for path in (saved, ended):
        (path / "checkpoints" / "step-1.pt").touch()
    (saved / SUMMARY).write_text('{"status":"interrupted", "earlier": {"status":"completed"}}')
    (ended / SUMMARY).write_text('{"status":"completed"}')
    assert resume(folder) == 1
    for path in (started, ended):
        assert "'overwrite=true'" in (path / LOG_NAME).read_text()
    assert "'resume=auto'" in (saved / LOG_NAME).read_text()
    assert not any(foreign.iterdir())
    assert f"not completed: {foreign} exists already" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_are_started_by_torchrun(stand_in, tmp_path):
    stand_in.write_text(
        "import os; os.write(1, '{RANK} of {WORLD_SIZE};'.format(**os.environ).encode())"
    )
    several = Job(0, "a", ["model=resnet18"], nproc=2)
    assert start_job(several, tmp_path / "a", Place()).wait(LIMIT_S) == 0
    log = (tmp_path / "a" / LOG_NAME).read_text()
    assert "0 of 2;" in log and "1 of 2;" in log


def test_jobs_run_in_the_environments_that_are_compared(stand_in, folder, monkeypatch, capsys):
    other = "environment='SPEED=125,TORCH=2.11.0'"
    words = ["compare_by=environment", "model=resnet18", "channels_last=false", "repeats=2"]
    assert sweep(folder, f"{other},here", *words) == 0
    (pair,) = compared(folder)
    assert pair["baseline"] == "environment=SPEED=125,TORCH=2.11.0"
    assert (pair["candidate"], pair["ratio"]) == ("environment=here", 0.8)
    assert "environment.torch (2.11.0 and 2.15.0)" in " ".join(pair["notes"])

    # What is read from a folder starts no Python and sets no variable.
    shutil.rmtree(folder / "resnet18_contiguous_environment=here_1")
    with pytest.raises(ConfigError, match=re.escape(f"repeat {other}")):
        main(["-m", f"resume_sweep={folder}"])
    assert main(["-m", f"resume_sweep={folder}", other]) == 0
    assert capsys.readouterr().out.endswith(
        f"\nCurves: tensorboard --logdir {folder}/tensorboard\n"
    )

    with pytest.raises(ConfigError, match="a setting of multirun"):
        main(["environment='SPEED=125'", "--cfg", "job"])
    monkeypatch.setenv("SPEED", "125")  # in the process of a job
    assert main(["environment='SPEED=125'", "--cfg", "job"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_still_writes_the_report(stand_in, folder, signum):
    (stand_in.parent / "saved").touch()
    process = launch(stand_in, folder, "resnet18,vgg16,resnet34")
    process.send_signal(signum)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum
    done, interrupted, pending = problems(folder)
    assert (done, pending) == (None, "has not run")
    assert str(interrupted).startswith("interrupted, stopped by SIG")
    assert "stopped by SIG" in output and "resume_sweep=" in output
    assert len(compared(folder, "failed")) == 2


@pytest.mark.slow
def test_a_killed_launcher_takes_its_job_along_and_resumes(stand_in, folder, capsys, monkeypatch):
    """Resuming is refused while the launcher runs, and waits for a job that is still ending."""
    saved = stand_in.parent / "saved"  # when the resumed sweep waits for the job
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: saved.touch()))
    with launch(stand_in, folder, "vgg16,resnet18") as launcher:
        with pytest.raises(ConfigError, match=str(launcher.pid)):
            resume(folder)
        (stand_in.parent / "mended").touch()
        launcher.kill()
    assert outcome_of(folder / "vgg16_channels_last") == "runs, or was killed"
    assert resume(folder) == 0
    assert capsys.readouterr().err.count("waiting for vgg16_channels_last: locked by") == 1


@pytest.mark.parametrize(
    ("words", "disturbed", "jobs", "verdict"),
    [
        ("repeats=2", 1, 4, "not_comparable"),
        ("repeats=auto", 1, 8, "faster"),  # the other three repeats decide
        ("repeats=auto max_repeats=4", 99, 8, "not_comparable"),  # a machine that is never quiet
    ],
)
def test_disturbed_runs_do_not_count_and_auto_adds_others(
    words, disturbed, jobs, verdict, planted, folder, capsys
):
    planted.disturbed = disturbed
    assert sweep(folder, BOTH, "model=resnet18", *words.split()) == 0
    assert len(planted.ran) == jobs
    [pair] = compared(folder)
    assert pair["verdict"] == verdict
    printed = capsys.readouterr().out
    assert "disturbed: it waited for a core in 60 %" in printed
    command = f"OMP_NUM_THREADS=1 cl-train benchmark config={folder}/resnet18_channels_last_1 "
    assert printed.count(f"on a busy machine this decides: {command}") == 1
    if verdict == "faster":
        assert (pair["n"], pair["to_decide"]) == (3, None)
        assert "disturbed them: 1 of the repeats" in " ".join(pair["notes"])
        return
    assert ("undecided: max_repeats=4 is reached" in printed) == ("auto" in words)
    [advised] = re.findall(
        rf"resume_sweep={folder} (repeats=auto max_repeats=\d+)", pair["to_decide"]
    )
    planted.disturbed = 0
    assert resume(folder, *advised.split()) == 0
    assert compared(folder)[0]["verdict"] == "faster"


def test_a_sweep_gets_more_repeats(planted, folder):
    planted.noise_pct = [0, 50, -50, 0]
    assert sweep(folder, BOTH, "model=resnet18", "repeats=2") == 0
    assert compared(folder)[0]["verdict"] == "inconclusive"
    [advised] = re.findall(r"-m resume_sweep=.* (repeats=\d+)", compared(folder)[0]["to_decide"])
    assert resume(folder, advised) == 0
    assert read_sweep(folder).looks == 2 and f"repeats={compared(folder)[0]['n']}" == advised
    jobs = [name.removeprefix("resnet18_") for name in planted.ran[4:8]]
    assert jobs == ["channels_last_3", "contiguous_3", "contiguous_4", "channels_last_4"]


def test_repeats_auto_adds_to_what_is_undecided(planted, folder):
    """The second model is noisy at first."""
    quiet = [0, 0.1, -0.1, 0]
    planted.noise_pct = [*quiet, *quiet, 0, 30, -30, 0, *quiet * 12]
    assert sweep(folder, BOTH, "model=resnet18,vit_b_16", "repeats=auto") == 0
    first, second = compared(folder)
    assert (first["verdict"], first["n"]) == ("faster", 4)
    assert second["verdict"] == "faster" and 6 <= second["n"] <= 12 and second["n"] % 2 == 0
    assert read_sweep(folder).looks == 5  # after 4, 6, 8, 10 and 12 repeats
    more = plan_sweep(runs_of(f"resume_sweep={folder}", "repeats=auto", "max_repeats=20"))
    assert more.looks == 9, "each of more looks may err less"


@pytest.mark.parametrize(("limit", "repeats"), [("max_repeats=3", 3), ("time_limit_s=1e-9", 4)])
def test_repeats_auto_says_why_it_gives_up(limit, repeats, planted, folder, capsys):
    planted.noise_pct = [50, -50] * 20
    assert sweep(folder, BOTH, "model=vit_b_16", "repeats=auto", limit) == 0
    [pair] = compared(folder)
    assert (pair["n"], pair["verdict"]) == (repeats, "inconclusive")
    assert "repeats=auto" in pair["to_decide"]
    gives_up = f"gives up with 1 of 1 comparisons undecided: .*{limit.partition('=')[0]}"
    assert re.search(gives_up, capsys.readouterr().out)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../escape"},
        {"overrides": ["model=resnet18", "+hydra.run.dir=/tmp/escape"]},
        {"overrides": ["-m", "model=resnet18,vgg11"]},
        {"repeat": "one"},
    ],
)
def test_a_sweep_that_somebody_left_runs_nothing_outside_its_folder(change, planted, folder):
    saved_plan(folder)
    path = folder / "sweep.json"
    document = json.loads(path.read_text())
    document["jobs"][0] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"sweep\.json cannot be read: [^\n]*$"):
        resume(folder)
    assert planted.ran == []


def test_a_job_does_not_follow_a_link_out_of_its_sweep(stand_in, folder, tmp_path):
    (tmp_path / "precious").mkdir()
    for planned_job in saved_plan(folder).jobs:
        (folder / planned_job.name).symlink_to(tmp_path / "precious")
    assert resume(folder) == 1
    assert not any((tmp_path / "precious").iterdir())


def test_a_running_job_has_a_place(tmp_path):
    assert sweep_module.progress_of(tmp_path) == "starts"
    line = "Epoch: [{}][10/125] Time 0.198 (0.198) Speed 1012.1 (1010.9) ETA {}\n"
    (tmp_path / LOG_NAME).write_text(line.format(0, "1:20") + line.format(1, "0:52") + "Epoch: [2")
    assert sweep_module.progress_of(tmp_path) == "[1][10/125], 0:52 left"


@pytest.mark.slow
def test_pairs_stay_on_one_gpu_and_alternate(stand_in, folder, monkeypatch):
    """Two cores stand in for GPUs. A job begins when the other GPU has had one."""
    both_run = """
while len({line.split()[-1] for line in open(here / "calls")}) < 2:
    time.sleep(0.01)
assert os.sched_getaffinity(0) == {0, 1}
def end"""
    stand_in.write_text(STAND_IN.replace("\ndef end", both_run))
    monkeypatch.setattr(places_module, "usable_cores", lambda: [0, 1] * 2)
    monkeypatch.setattr(sweep_module, "visible_gpus", lambda: ["0", "1"])
    words = ["model=resnet18,resnet34", "repeats=2", "data=synthetic", "launcher.gpus=0,1"]
    assert sweep(folder, BOTH, *words) == 0
    started, used = calls(stand_in), []
    for model in ("resnet18", "resnet34"):
        jobs = [name.removeprefix(f"{model}_") for name in started if name.startswith(model)]
        assert jobs == ["channels_last_1", "contiguous_1", "contiguous_2", "channels_last_2"]
        [gpu] = {gpu for name, gpu in started.items() if name.startswith(model)}
        used.append(gpu)
    assert set(used) == {"0", "1"}
    assert {pair["verdict"] for pair in compared(folder)} == {"faster"}
