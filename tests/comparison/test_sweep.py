"""Sweeps of a stand-in for train.py, whose jobs fail in several ways, and one of the real program."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cl_train.comparison import sweep as sweep_module
from cl_train.comparison.report import compare_folders
from cl_train.comparison.sweep import LocalJobs, Slot, run_sweep
from cl_train.comparison.sweep_plan import LOG_NAME, plan_sweep, problem_of, read_sweep
from cl_train.config.command_line import check_command_line
from cl_train.config.schema import ConfigError
from cl_train.system import files
from tests.faults.forkserver import ForkServer
from tests.processes import LIMIT_S, Process, wait_until

ROOT = Path(__file__).resolve().parents[2]

# Leaves the records of a run: channels_last=true is 1.5 times as fast. Some models misbehave until `mended` exists.
STAND_IN = """
import json, os, pathlib, signal, sys, time
settings = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(settings["hydra.run.dir"].strip("'"))
model, mended = settings["model"], (pathlib.Path(__file__).parent / "mended").exists()
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    calls.write(folder.name + "\\n")
place = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "cores": sorted(os.sched_getaffinity(0)), "at": time.time()}
(folder / "place.json").write_text(json.dumps(place))
if model == "alexnet" and not mended:
    raise RuntimeError("the weights are not numbers")
if model == "vgg11" and not mended:
    os.kill(os.getpid(), signal.SIGKILL)
if model == "vgg13" and not mended:
    raise MemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
if model == "vgg16" and not mended:
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
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "program" / "stand_in.py"
    path.parent.mkdir()
    path.write_text(STAND_IN)
    return path


def calls(stand_in: Path) -> list[str]:
    return (stand_in.parent / "calls").read_text().split()


def problems(folder: Path) -> dict[str, str | None]:
    """Of each job of the sweep in `folder`, by its name."""
    return {job.name: problem_of(folder / job.name) for job in read_sweep(folder).jobs}


def sweep(stand_in: Path, folder: Path, *words: str) -> int:
    return run_sweep(["-m", *words, f"hydra.sweep.dir={folder}"], [str(stand_in)])


def test_jobs_that_are_compared_are_adjacent_and_alternate() -> None:
    planned = plan_sweep(["-m", "channels_last=true,false", "model=resnet18,alexnet", "repeats=2", "epochs=2"])
    assert [job.name for job in planned.jobs] == [
        "resnet18_channels_last_1",
        "resnet18_contiguous_1",
        "resnet18_contiguous_2",
        "resnet18_channels_last_2",
        "alexnet_channels_last_1",
        "alexnet_contiguous_1",
        "alexnet_contiguous_2",
        "alexnet_channels_last_2",
    ]
    assert planned.jobs[0].overrides == ["epochs=2", "channels_last=true", "model=resnet18"]
    assert planned.folder.parent == Path("multirun")


def test_a_setting_that_is_the_same_in_all_jobs_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """With the setting to compare by instead; not where a sweep compares its own setting, or has one job."""
    cases = {
        ("optim.lr=0.1,0.2",): "compare_by=optim.lr",
        ("optim=sgd,adamw",): "compare_by=optim.name",
        ("nproc=1,2",): "compare_by=nproc",
        ("seed=1,2", "compare_by=precision"): "compare_by=seed",
        ("seed=1,2", "channels_last=true,false"): "",
        ("optim=sgd,adamw", "compare_by=optim.name"): "",
        ("repeats=2",): "",
        ("augment=basic,strong", "compare_by=augment.flip"): "",
    }
    for words, expected in cases.items():
        plan_sweep(["-m", *words])
        output = capsys.readouterr().out
        assert expected in output and bool(expected) == bool(output), words


def test_choices_of_a_group_are_compared_by_its_name() -> None:
    words = ["schedule=cosine,linear", "model=resnet18,alexnet", "epochs=2"]
    planned = plan_sweep(["-m", *words, "compare_by=schedule.name"])
    assert [job.group for job in planned.jobs] == [0, 0, 1, 1]
    assert planned.jobs[1].overrides == ["epochs=2", "schedule=linear", "model=resnet18"]


def test_sweep_syntax_is_hydras() -> None:
    planned = plan_sweep(["-m", "batch_size=range(8,25,8)", "model=choice(resnet18,resnet50)", "nproc=1,2"])
    assert [job.nproc for job in planned.jobs[:2]] == [1, 2]
    assert planned.jobs[1].name == "resnet18_contiguous_batch_size=8_nproc=2"
    assert not any("nproc" in word for job in planned.jobs for word in job.overrides)
    assert len(planned.jobs) == 12


def test_the_jobs_are_the_combinations_that_were_checked() -> None:
    """The sweep splits the arguments itself."""
    words = ["-m", "channels_last=true,false", "optim.lr=0.1,0.2", "model=resnet18", "select=[]"]
    checked = sorted((cfg.channels_last, cfg.optim.lr) for cfg in check_command_line(words))
    planned = [dict(word.split("=", 1) for word in job.overrides) for job in plan_sweep(words).jobs]
    assert sorted((job["channels_last"], float(job["optim.lr"])) for job in planned) == checked


def test_names_are_safe_and_short() -> None:
    planned = plan_sweep(["-m", "optim.lr=0.1,0.2", "precision=bf16,fp32", "model=tests.networks:small"])
    assert planned.jobs[0].name == "tests.networks.small_contiguous_lr=0.1_bf16"
    planned = plan_sweep(["-m", "channels_last=true,false", "data.root='/a/very/long path/" + "x" * 200 + "',/b"])
    assert all(len(job.name) <= 100 and "/" not in job.name and " " not in job.name for job in planned.jobs)
    assert len({job.name for job in planned.jobs}) == 4


def test_a_sweep_ends_in_a_verdict(stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    assert sweep(stand_in, folder, "channels_last=true,false", "model=resnet18") == 0
    report = json.loads((folder / "comparison.json").read_text())
    [pair] = report["pairs"]
    assert (pair["baseline"], pair["candidate"], pair["verdict"]) == ("contiguous", "channels_last", "faster")
    assert pair["ratio"] == pytest.approx(1.5, rel=0.02)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, "one line for the sweep, one per job and the verdict"
    assert "resnet18_channels_last: completed" in lines[1] and "150.5 images/s" in lines[1]
    assert "left" in lines[1], "an estimate of the time left"
    assert lines[-1].startswith("resnet18 (bf16): channels_last is faster, 1.5")
    assert lines[-1].endswith(f"Report: {folder}/comparison.md")


def test_bad_jobs_do_not_stop_the_others_and_are_run_again(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    words = ["channels_last=true", "model=resnet18,alexnet,resnet34,vgg11,vgg13,resnet50"]
    assert sweep(stand_in, folder, *words) == 1
    jobs = {name.partition("_")[0]: str(why) for name, why in problems(folder).items()}
    assert [name for name, why in jobs.items() if why == "None"] == ["resnet18", "resnet34", "resnet50"]
    assert jobs["alexnet"] == "RuntimeError: the weights are not numbers (exit code 1)"
    assert jobs["vgg11"].startswith("killed by SIGKILL")
    assert jobs["vgg13"].startswith("MemoryError: DefaultCPU")
    failed = json.loads((folder / "comparison.json").read_text())["failed"]
    assert [entry["job"] for entry in failed] == [1, 3, 4]
    assert "killed by SIGKILL" in (folder / "comparison.md").read_text()
    verdict, resume = capsys.readouterr().out.splitlines()[-2:]
    assert "3 jobs did not finish" in verdict and f"resume_sweep={folder} runs what is missing" in resume

    (stand_in.parent / "mended").touch()
    (stand_in.parent / "calls").unlink()
    assert run_sweep(["-m", f"resume_sweep={folder}"], [str(stand_in)]) == 0
    assert calls(stand_in) == ["alexnet_channels_last", "vgg11_channels_last", "vgg13_channels_last"]
    assert set(problems(folder).values()) == {None}
    assert json.loads((folder / "comparison.json").read_text())["failed"] == []


def test_pairs_stay_on_one_gpu_and_alternate(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPU slots take the place of GPUs. A job begins when the other GPU has had one."""
    stand_in.write_text(
        STAND_IN.replace(
            'if model == "alexnet"',
            "end = time.monotonic() + 300\n"
            'while len({p.read_text()[:12] for p in folder.parent.glob("*/place.json")}) < 2:\n'
            "    assert time.monotonic() < end\n"
            "    time.sleep(0.01)\n"
            'if model == "alexnet"',
        )
    )
    monkeypatch.setattr(sweep_module, "own_cores", lambda: [0, 1] * 2)
    folder = tmp_path / "sweep"
    words = ["channels_last=true,false", "model=resnet18,resnet34", "repeats=2", "data=synthetic"]
    arguments = ["-m", *words, "launcher.gpus=0,1", f"hydra.sweep.dir={folder}"]
    assert run_sweep(arguments, [str(stand_in)], gpus=["0", "1"]) == 0
    places = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/place.json")}
    used = []
    for model in ("resnet18", "resnet34"):
        jobs = sorted((place["at"], name, place["gpus"]) for name, place in places.items() if name.startswith(model))
        suffixes = [name.removeprefix(f"{model}_") for _, name, _ in jobs]
        assert suffixes == ["channels_last_1", "contiguous_1", "contiguous_2", "channels_last_2"], "A B B A"
        assert len({gpu for *_, gpu in jobs}) == 1, "a pair stays on one GPU"
        used.append(jobs[0][2])
    assert set(used) == {"0", "1"}
    assert all(place["cores"] == [0, 1] for place in places.values())
    assert {pair["verdict"] for pair in json.loads((folder / "comparison.json").read_text())["pairs"]} == {"faster"}


def test_gpus_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher\.gpus"):
        run_sweep(["-m", "channels_last=true,false", "launcher.gpus=all", f"hydra.sweep.dir={tmp_path}/a"], gpus=[])
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("others_pct", "verdict", "notes"), [(None, "faster", 2), (15.0, "faster", 2), (40.0, "not_comparable", 1)]
)
def test_compare_and_the_sweep_reach_the_same_verdict(
    stand_in: Path, tmp_path: Path, others_pct: float | None, verdict: str, notes: int
) -> None:
    """The load of the machine is in each run's summary. One note says that there is one run per side."""
    folder = tmp_path / "sweep"
    summary = f'"device": "cpu", "others_pct": {others_pct}'
    stand_in.write_text(stand_in.read_text().replace('"world_size": 1', f'"world_size": 1, {summary}'))
    assert sweep(stand_in, folder, "channels_last=true,false", "model=resnet18") == 0
    runs = [folder / f"resnet18_{layout}" for layout in ("contiguous", "channels_last")]
    [by_sweep] = json.loads((folder / "comparison.json").read_text())["pairs"]
    assert (by_sweep["verdict"], len(by_sweep["notes"])) == (verdict, notes)
    for folders in ([folder], runs, runs[::-1]):
        compare_folders(folders, out=tmp_path / "report")
        assert json.loads((tmp_path / "report" / "comparison.json").read_text())["pairs"] == [by_sweep]


def test_resuming_takes_no_other_settings(stand_in: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    assert sweep(stand_in, folder, "channels_last=true,false", "model=resnet18") == 0
    with pytest.raises(ConfigError, match="resume_sweep"):
        run_sweep(["-m", "channels_last=true,false", "model=resnet50", f"resume_sweep={folder}"], [str(stand_in)])
    with pytest.raises(ConfigError, match="resume_sweep"):
        sweep(stand_in, folder, "channels_last=true,false", "model=resnet18")
    with pytest.raises(ConfigError, match="resume_sweep"):
        run_sweep(["-m", "compare_by=precision", f"resume_sweep={folder}"], [str(stand_in)])
    with pytest.raises(ConfigError, match=r"sweep\.json"):
        run_sweep(["-m", f"resume_sweep={tmp_path}"], [str(stand_in)])


def test_an_interrupted_job_with_a_checkpoint_goes_on_from_it(stand_in: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    words = ["channels_last=true,false", "model=resnet18", "batch_size=auto"]
    [job, _] = plan_sweep(["-m", *words, f"hydra.sweep.dir={folder}"]).jobs
    (folder / job.name / "checkpoints").mkdir(parents=True)
    (folder / job.name / "checkpoints" / "step-1.pt").touch()
    (folder / job.name / "config.yaml").write_text("model: resnet18\nbatch_size: 96\n")
    (folder / job.name / LOG_NAME).touch()
    stand_in.write_text("import sys; print(sys.argv)")
    assert LocalJobs(folder, [[job]], [Slot()], [str(stand_in)]).run() == 0
    assert "'batch_size=96', 'resume=auto'" in (folder / job.name / LOG_NAME).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_still_writes_the_report(stand_in: Path, tmp_path: Path, signum: int) -> None:
    folder = tmp_path / "sweep"
    program = (
        "import sys; from cl_train.comparison.sweep import run_sweep; "
        f"sys.exit(run_sweep(['-m', 'channels_last=true', 'model=resnet18,vgg16,resnet34', "
        f"'hydra.sweep.dir={folder}'], [{str(stand_in)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until((folder / "vgg16_channels_last" / "ready").exists)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum
    done, interrupted, pending = problems(folder).values()
    assert done is None and pending == "has not run" and str(interrupted).startswith("interrupted, stopped by SIG")
    assert "stopped by SIG" in output and "resume_sweep=" in output
    assert len(json.loads((folder / "comparison.json").read_text())["failed"]) == 2


def test_under_torchrun_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="nproc=N"):
        run_sweep(["-m", "channels_last=true,false"])


@pytest.mark.slow
def test_several_processes_are_started_by_torchrun(stand_in: Path, tmp_path: Path) -> None:
    stand_in.write_text(
        'import os; os.write(1, f\'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    )
    planned = plan_sweep(["-m", "nproc=2", "model=resnet18", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    planned.folder.mkdir()
    LocalJobs(planned.folder, [planned.jobs[:1]], [Slot()], [str(stand_in)]).run()
    log = (planned.folder / planned.jobs[0].name / LOG_NAME).read_text()
    assert "rank 0 of 2" in log and "rank 1 of 2" in log


@pytest.mark.slow
def test_a_sweep_of_the_real_program(tmp_path: Path, image_folder: Path, fork_server: ForkServer) -> None:
    words = [
        *("-m", "channels_last=true,false", "data=folder", f"data.root={image_folder}", "data.image_size=32"),
        *("data.workers=0", "model=tests.networks:small", "device=cpu", "precision=fp32", "epochs=2", "batch_size=16"),
        *("log_every=1", "warmup_steps=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"),
    ]
    done = fork_server.start(words, tmp_path / "log")
    assert done.wait() == 0, done.output()
    [pair] = json.loads((tmp_path / "sweep" / "comparison.json").read_text())["pairs"]
    assert (pair["baseline"], pair["candidate"]) == ("contiguous", "channels_last")
    assert abs(pair["loss_gap"]) < 1e-3, "equal weights, data and order: the layouts must learn the same"
    assert done.output().splitlines()[-1].endswith("comparison.md")


def test_a_value_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="channels_last: a value is listed twice"):
        plan_sweep(["-m", "channels_last=false,false"])


def test_equal_names_get_a_number() -> None:
    planned = plan_sweep(["-m", "weights=a/b.pth,a_b.pth"])
    assert len({job.name for job in planned.jobs}) == 2


def test_a_sweep_by_another_key(stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    assert sweep(stand_in, folder, "model=resnet18", "channels_last=true", "precision=bf16,fp32") == 0
    assert "compare_by=precision" in capsys.readouterr().out.splitlines()[0], "before the start"
    assert compare_folders([folder]).pairs == [], "one layout only"
    assert "compare_by=precision" in capsys.readouterr().out
    [pair] = compare_folders([folder], "precision").pairs
    assert (pair.baseline, pair.candidate) == ("precision=fp32", "precision=bf16")


# --- nothing of others is deleted -------------------------------------------------------------------------------------


def test_a_sweep_without_axes_has_a_name_and_deletes_nothing(stand_in: Path, tmp_path: Path) -> None:
    for name in ("run", "resnet18_contiguous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    with pytest.raises(ConfigError, match="resnet18_contiguous"):
        sweep(stand_in, tmp_path)
    (tmp_path / "resnet18_contiguous").rename(tmp_path / "other")
    assert sweep(stand_in, tmp_path, "model=resnet18", "channels_last=false") == 0
    assert (tmp_path / "run" / "precious").exists() and (tmp_path / "other" / "precious").exists()
    assert (tmp_path / "resnet18_contiguous" / "metrics.jsonl").exists()


def test_resuming_uses_only_folders_that_the_sweep_has_started(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan_sweep(["-m", "channels_last=true,false", "model=resnet18", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    started, foreign = (planned.folder / job.name for job in planned.jobs)
    for folder in (started, foreign):
        folder.mkdir(parents=True)
    (started / LOG_NAME).touch()
    planned.save()
    stand_in.write_text(STAND_IN.replace("settings = ", "print(sys.argv); settings = "))
    assert run_sweep(["-m", f"resume_sweep={planned.folder}"], [str(stand_in)]) == 1
    assert problem_of(started) is None and "'overwrite=true'" in (started / LOG_NAME).read_text()
    assert not any(foreign.iterdir())
    assert f"failed ({foreign} exists already" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["deleted", "metrics.jsonl", "summary.json"])
def test_what_is_lost_after_a_sweep_runs_again(stand_in: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "sweep"
    assert sweep(stand_in, folder, "channels_last=true,false", "model=resnet18") == 0
    lost = folder / "resnet18_contiguous"
    if damage == "deleted":
        shutil.rmtree(lost)
    else:
        (lost / damage).write_text("garbage\n{\n")
    assert problem_of(lost) is not None
    (stand_in.parent / "calls").unlink()
    assert run_sweep(["-m", f"resume_sweep={folder}"], [str(stand_in)]) == 0
    assert calls(stand_in) == [lost.name]
    assert len(json.loads((folder / "comparison.json").read_text())["pairs"]) == 1


@pytest.mark.parametrize("name", ["../precious", "a/b", ""])
def test_a_record_cannot_name_other_folders(tmp_path: Path, name: str) -> None:
    jobs = [{"number": 0, "name": name, "overrides": [], "status": "failed"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"compare_by": "channels_last", "jobs": jobs}))
    with pytest.raises(ConfigError):
        read_sweep(tmp_path)


@pytest.mark.slow
def test_a_killed_launcher_takes_its_job_along_and_can_be_resumed(stand_in: Path, tmp_path: Path) -> None:
    """Resuming is refused while the launcher runs, and waits for a job that is still ending."""
    folder = tmp_path / "sweep"
    program = (
        "import sys; from cl_train.comparison.sweep import run_sweep; "
        f"sys.exit(run_sweep(['-m', 'channels_last=true', 'model=vgg16,resnet18', "
        f"'hydra.sweep.dir={folder}'], [{str(stand_in)!r}]))"
    )
    launcher_process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    ready = folder / "vgg16_channels_last" / "ready"
    wait_until(ready.exists)
    with pytest.raises(ConfigError, match=str(launcher_process.pid)):
        run_sweep(["-m", f"resume_sweep={folder}"], [str(stand_in)])
    job = Process(int(ready.read_text()))
    launcher_process.kill()
    launcher_process.wait()
    wait_until(lambda: not job.is_running())
    (stand_in.parent / "mended").touch()
    assert run_sweep(["-m", f"resume_sweep={folder}"], [str(stand_in)]) == 0
    assert set(problems(folder).values()) == {None}


def test_a_job_waits_for_the_process_that_still_writes_to_its_folder(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep(["-m", "channels_last=true", "model=resnet18", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    [job] = planned.jobs
    (planned.folder / job.name).mkdir(parents=True)
    (planned.folder / job.name / LOG_NAME).touch()
    planned.save()
    program = (
        "import time; from cl_train.system.files import lock_file\n"
        f"with lock_file({str(planned.folder / job.name / '.lock')!r}):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(10_000)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()

    def end_the_holder(seconds: float) -> None:
        holder.kill()
        holder.wait()

    clock = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=end_the_holder)
    monkeypatch.setattr(files, "time", clock)
    assert run_sweep(["-m", f"resume_sweep={planned.folder}"], [str(stand_in)]) == 0
    assert holder.returncode == -signal.SIGKILL
    holder.stdout.close()
    assert str(holder.pid) in capsys.readouterr().err


# --- long enough ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["data=synthetic", "max_steps=20"],  # one window of ten steps after ten of warm-up
        ["data=synthetic", "data.synthetic_images=320", "epochs=4"],  # ten steps an epoch, the first is warm-up
        ["data=sample", "epochs=1", "batch_size=32"],  # 34 steps: 10 to 20, to 30, to 34
        ["data=folder", "data.root=/nowhere", "max_steps=40"],
    ],
)
def test_a_sweep_of_runs_that_are_too_short_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="log_every"):
        plan_sweep(["-m", "channels_last=true,false", *words])
    assert plan_sweep(["-m", "seed=1,2", *words]).jobs, "these are not compared"
    longer = [word for word in words if not word.startswith(("epochs", "max_steps"))]
    assert plan_sweep(["-m", "channels_last=true,false", *longer, "epochs=5", "max_steps=50"]).jobs
