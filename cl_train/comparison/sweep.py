"""`python train.py -m ...`: run every job of a sweep in its own process, here or on a Slurm cluster, then compare.

On a cluster each group of jobs that are compared is an element of an array, which runs this program for that group:
`resume_sweep=FOLDER only_group=N`. Before the time limit, and when Slurm preempts the element, the running job saves a
checkpoint; the element is requeued and resumes there.
"""

import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from cl_train.comparison.pairs import read_run
from cl_train.comparison.report import compare_folders
from cl_train.comparison.sweep_plan import LOG_NAME, Job, Sweep, lines_of_log, plan_sweep, problem_of, write_end
from cl_train.config.command_line import Composed, quoted
from cl_train.config.schema import ConfigError
from cl_train.system.files import LockHeld, lock_file
from cl_train.system.processes import STOP_SIGNALS, end_with_parent, read_launch

PROGRAM: Sequence[str] = ("-m", "cl_train", "train")  # of a job; tests replace it
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_QUEUE_POLL_S = 5.0
_TIME_LIMIT_SIGNAL = signal.SIGUSR2
_WARNING_S = 120  # before the time limit the jobs are asked to save a checkpoint
_ERROR_LINE = re.compile(r"(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)\b|.*\bthe run failed: ")


@dataclass(frozen=True)
class Slot:
    """Where one job at a time runs."""

    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; () = all that are visible
    cores: tuple[int, ...] = ()  # () = all that this process may use
    nodes: int = 1  # of a Slurm allocation; above 1, srun starts the processes
    cpus_per_task: int | None = None  # of srun


def run_sweep(arguments: Sequence[str], runs: Sequence[Composed] | None = None) -> int:
    """Run all jobs of train.py's `arguments`, then write the comparison. `runs` as in `plan_sweep`.

    Returns the exit code: 0, 1 if a job has not completed, 128 + n after signal n (the comparison is written too).
    Raises ConfigError: as `plan_sweep` and `plan_slots`, under torchrun or srun, or another process runs this sweep.
    """
    if read_launch() is not None:
        raise ConfigError("torchrun and srun cannot start a sweep: python train.py -m nproc=N starts torchrun")
    sweep = plan_sweep(arguments, runs)
    if sweep.only_group is not None:
        return _run_element(sweep)
    groups, slots, signum = sweep.missing_groups(), [Slot()], 0
    if sweep.launcher.name == "slurm":
        _check_slurm(sweep)
    elif sweep.launcher.gpus and groups:
        import torch

        count = torch.cuda.device_count()
        named = re.findall(r"[^,\s]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")) or list(map(str, range(count)))
        slots = plan_slots(sweep.launcher.gpus, named[:count], groups)
        names = ", ".join(f"GPU {','.join(slot.gpus)}" for slot in slots)
        print(f"{len(slots)} jobs at a time, each with {len(slots[0].cores)} CPU cores: {names}")
    if (sweep.folder / "slurm").exists() and (ids := _queued_elements(sweep)):
        raise ConfigError(f"Slurm still has jobs of this sweep ({', '.join(ids)}): wait for them, or scancel them")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    folder, count = shlex.quote(str(sweep.folder)), sum(map(len, groups))
    with lock_file(sweep.folder / ".sweep.lock"):
        sweep.save()
        print(f"sweep of {len(sweep.jobs)} jobs, {count} to run, in {sweep.folder}/<job>/{LOG_NAME}", flush=True)
        if sweep.launcher.name == "local":
            signum = run_jobs(sweep.folder, groups, slots)
        elif groups:
            signum = _submit(sweep, [group[0].group for group in groups])
        if sweep.launcher.name == "slurm" and (signum or not sweep.launcher.wait):
            print(f"the Slurm jobs continue; cl-train compare {folder} reports what has ended")
            return 128 + signum if signum else 0
        compare_folders([sweep.folder])
    has_missing = bool(sweep.missing_groups())
    if has_missing:
        print(f"python train.py -m resume_sweep={folder} runs what is missing", flush=True)
    return 128 + signum if signum else int(has_missing)


def plan_slots(asked: Sequence[str], visible: Sequence[str], groups: Sequence[Sequence[Job]]) -> list[Slot]:
    """Divide the GPUs of `launcher.gpus` and the CPU cores among the jobs that run at the same time, one per group.

    A job chooses its loader workers and threads by the cores of its slot, and measures the load of others on them.
    Raises ConfigError: too few GPUs or cores, or GPUs that do not exist.
    """
    gpus, cores, jobs = list(visible if list(asked) == ["all"] else asked), own_cores(), list(itertools.chain(*groups))
    size = max(job.nproc for job in jobs)
    on_cpu = any("device=cpu" in job.overrides for job in jobs)
    if on_cpu or len(set(gpus) & set(visible)) < max(len(gpus), size):
        wanted = (
            f"nproc={size} or more of the GPUs {','.join(visible) or '(none)'}, each once, for jobs without device=cpu"
        )
        raise ConfigError(f"launcher.gpus={','.join(asked)}: name {wanted}")
    count = min(len(gpus) // size, len(groups))
    share = len(cores) // count
    needed = size if all("data=synthetic" in job.overrides for job in jobs) else 2 * size  # processes and loaders
    if share < needed:
        limit = f"the loader would limit the speed: use GPUs for {len(cores) // needed} jobs at most"
        raise ConfigError(f"{count} jobs at a time have {share} CPU cores each and need {needed}, or {limit}")
    return [Slot(tuple(gpus[size * i :][:size]), tuple(cores[share * i :][:share])) for i in range(count)]


def own_cores() -> list[int]:
    """The cores of this process, those that share a physical core adjacent: slots must not share any."""
    places = {}
    for core in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        places[core] = int(re.findall(r"\d+", siblings.read_text())[0]) if siblings.is_file() else core
    return sorted(places, key=lambda core: (places[core], core))


def run_jobs(
    folder: Path,
    groups: Sequence[Sequence[Job]],
    slots: Sequence[Slot],
    *,
    stop_signals: Sequence[int] = STOP_SIGNALS,
    grace_s: float = 20.0,
) -> int:
    """Run the jobs of a sweep in its folder; each slot takes the next group. Returns the first stop signal, or 0.

    After a signal no job starts; a running one may take `grace_s` to save a checkpoint, a second Ctrl-C kills it.
    """
    signals: list[int] = []
    count, ended, began_s, kill_at = sum(map(len, groups)), 0, time.monotonic(), math.inf
    unassigned = iter(groups)
    queues = {slot: itertools.chain.from_iterable(unassigned) for slot in slots}  # each takes groups from `unassigned`
    held: dict[Slot, Job] = {}  # its folder is locked by an earlier process of the job, which is still ending
    running: dict[Slot, tuple[Job, subprocess.Popen[bytes], float]] = {}
    with signals_noted(stop_signals, signals):
        while True:
            for slot in slots:
                if slot in running and running[slot][1].poll() is not None:
                    job, process, started_s = running.pop(slot)
                    ended += 1
                    outcome = _outcome(folder / job.name, process.returncode, signals)
                    took = timedelta(seconds=round(time.monotonic() - started_s))
                    place = f" on GPU {','.join(slot.gpus)}" if slot.gpus else ""
                    left_s = round((time.monotonic() - began_s) / ended * (count - ended))
                    left = f"; about {timedelta(seconds=left_s)} left" if ended < count and not signals else ""
                    print(f"[{ended}/{count}] {job.name}: {outcome} in {took}{place}{left}", flush=True)
                while slot not in running and not signals and (next_job := held.get(slot) or next(queues[slot], None)):
                    try:
                        running[slot] = next_job, start_job(next_job, folder / next_job.name, slot), time.monotonic()
                    except LockHeld as error:
                        if slot not in held:
                            print(f"{next_job.name} waits: {error}", flush=True)
                        held[slot] = next_job
                        break
                    except (ConfigError, OSError) as error:
                        ended += 1
                        print(f"[{ended}/{count}] {next_job.name}: failed ({error})", flush=True)
                    held.pop(slot, None)
            if not running and (signals or not held):
                return next(iter(signals), 0)
            time.sleep(0.05)
            if signals and kill_at == math.inf:
                kill_at = time.monotonic() + grace_s
                for slot, (_, process, _) in running.items():
                    if slot.nodes > 1:  # srun would kill its tasks; scancel passes the signal on to them
                        subprocess.run(["scancel", "--signal=TERM", _own_element()], check=False)
                    else:
                        process.send_signal(signal.SIGINT if signals[0] == signal.SIGINT else signal.SIGTERM)
            if time.monotonic() > kill_at or signal.SIGINT in signals[1:]:
                for _, process, _ in running.values():
                    process.kill()  # its ranks and workers end with it


@contextmanager
def signals_noted(signals: Sequence[int], received: list[int]) -> Iterator[None]:
    """These signals are appended to `received` inside the block; not SIGHUP under nohup, which ignores it."""
    handled = [one for one in signals if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, lambda signum, frame: received.append(signum)) for one in handled}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def start_job(job: Job, folder: Path, slot: Slot) -> subprocess.Popen[bytes]:
    """Start the process of a job, which ends when this process is killed: a job must not outlive the sweep.

    Raises ConfigError: the folder is not one of this sweep. LockHeld: an earlier process of the job still writes to it.
    """
    words, log = [*job.overrides, f"hydra.run.dir={quoted(folder.absolute())}"], folder / LOG_NAME
    if log.exists():
        words = _continued(words, folder)
    elif folder.exists():
        raise ConfigError(f"{folder} exists already, and this sweep has not created it")
    folder.mkdir(exist_ok=True)
    launch = [sys.executable]
    if slot.nodes > 1:
        cores = [f"--cpus-per-task={slot.cpus_per_task}"] if slot.cpus_per_task else []
        launch = ["srun", f"--nodes={slot.nodes}", f"--ntasks={job.nproc}", "--kill-on-bad-exit=1", *cores, *launch]
    elif job.nproc > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.nproc}"]
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus[: job.nproc])} if slot.gpus else {}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*launch, *PROGRAM, *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **devices},
            process_group=0,  # Ctrl-C in a terminal must reach it once, from the sweep
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )  # fmt: skip
    if slot.cores:
        os.sched_setaffinity(process.pid, slot.cores)
    return process


def _continued(words: Sequence[str], folder: Path) -> list[str]:
    """The settings of a job that was started before: it goes on from its checkpoint, or begins again without one."""
    summary = folder / "summary.json"
    with lock_file(folder / ".lock"):
        is_completed = summary.is_file() and b'"status": "completed"' in summary.read_bytes()  # it has damaged records
        if is_completed or not any((folder / "checkpoints").glob("*.pt")):
            return [*words, "overwrite=true"]
    size = re.search(rb"^batch_size: \d+$", (folder / "config.yaml").read_bytes(), re.MULTILINE)
    measured = [size[0].decode().replace(": ", "=")] if size and "batch_size=auto" in words else []
    kept = [word for word in words if not word.startswith("resume=") and word != "batch_size=auto"]
    return [*kept, *measured, "resume=auto"]


def _outcome(folder: Path, exit_code: int, signals: Sequence[int]) -> str:
    """Record in the log of a job how its process ended (-n: by signal n), and say it in words."""
    try:
        lines = lines_of_log(folder)
        errors = [line for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
        how = f"{(errors or lines or ['no output'])[-1][:300]} (exit code {exit_code})"
        if exit_code == 0:
            how = "completed"
        elif signals or exit_code in (130, 143):
            name = signal.Signals(signals[0]).name if signals else f"a signal (exit code {exit_code})"
            how = f"interrupted, stopped by {name}"
        elif exit_code < 0:
            name = signal.Signals(-exit_code).name
            how = f"killed by {name}" + (", often because memory ran out (see dmesg)" if name == "SIGKILL" else "")
        write_end(folder, how)
        problem = problem_of(folder)
        speed = math.nan if problem else read_run(folder).results["images_per_s"] or math.nan
    except OSError as error:  # no space is left
        problem = str(error)
    if not problem:
        return f"completed, {speed:.1f} images/s"
    return problem if problem.startswith("interrupted") else f"failed ({problem})"


# --- Slurm ------------------------------------------------------------------------------------------------------------


def _check_slurm(sweep: Sweep) -> None:
    """Raises ConfigError: Slurm is missing, or the processes of a job cannot be spread evenly over the nodes."""
    if shutil.which("sbatch") is None:
        raise ConfigError("launcher=slurm: this machine has no sbatch; start the sweep on a login node of the cluster")
    if uneven := [job.nproc for job in sweep.jobs if job.nproc % sweep.launcher.nodes]:
        raise ConfigError(f"nproc={uneven[0]} must be a multiple of launcher.nodes={sweep.launcher.nodes}")
    if sweep.launcher.gpus_per_node is None and any("device=cpu" not in job.overrides for job in sweep.jobs):
        print("warning: no GPU is requested: set launcher.gpus_per_node=N, or device=cpu to train on CPUs", flush=True)


def _queued_elements(sweep: Sweep) -> list[str]:
    """Slurm's ids of elements that wait or run, or a word instead if squeue does not answer."""
    command = ["squeue", "--noheader", "--format=%i", f"--name={sweep.slurm_name}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except FileNotFoundError:  # a sweep of a cluster, resumed elsewhere
        return []
    except (OSError, subprocess.SubprocessError):
        return ["unknown, because squeue does not answer"]


def _submit(sweep: Sweep, groups: Sequence[int]) -> int:
    """Submit the groups and, unless launcher.wait=false, wait until they have ended; SIGINT after Ctrl-C, else 0."""
    folder = sweep.folder.resolve() / "slurm"
    folder.mkdir(exist_ok=True)
    script = folder / "array.sbatch"
    script.write_text(array_script(sweep, groups), encoding="utf-8")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["sbatch gives no reason"])[-1]
        raise ConfigError(f"launcher=slurm: {reason}; resume_sweep={sweep.folder} launcher.KEY=VALUE submits again")
    print(f"submitted as Slurm job {done.stdout.strip()}, logs in {folder}", flush=True)
    try:
        # `sbatch --wait` would take a requeued element for an ended one; so would squeue at the moment of the requeue.
        empty_answers = 0 if sweep.launcher.wait else 2
        while empty_answers < 2:
            time.sleep(_QUEUE_POLL_S)
            empty_answers = 0 if _queued_elements(sweep) else empty_answers + 1
    except KeyboardInterrupt:
        return signal.SIGINT
    return 0


def array_script(sweep: Sweep, groups: Sequence[int]) -> str:
    """The script of the array; element N runs group N."""
    launcher, folder, nproc = sweep.launcher, sweep.folder.resolve(), max(job.nproc for job in sweep.jobs)
    # On one node torchrun is one task with the cores of all processes; on several nodes srun starts a task per process.
    tasks, processes_per_task = (1, nproc) if launcher.nodes == 1 else (nproc // launcher.nodes, 1)
    options = [
        f"job-name={sweep.slurm_name}",
        f"array={','.join(map(str, groups))}" + (f"%{launcher.max_parallel}" if launcher.max_parallel else ""),
        f"output={folder}/slurm/%A_%a.log",
        "open-mode=append",
        "requeue",
        # B: the shell receives the signal; by default only the steps of srun do.
        f"signal=B:{_TIME_LIMIT_SIGNAL.name[3:]}@{_WARNING_S}",
        f"time={launcher.time_min}",
        f"nodes={launcher.nodes}",
        f"ntasks-per-node={tasks}",
        *([f"partition={launcher.partition}"] if launcher.partition else []),
        *([f"cpus-per-task={launcher.cpus_per_task * processes_per_task}"] if launcher.cpus_per_task else []),
        *([f"gpus-per-node={launcher.gpus_per_node}"] if launcher.gpus_per_node else []),
    ]
    words = [sys.executable, "-m", "cl_train", "train", "-m", f"resume_sweep={folder}", "only_group="]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in options),
        f"export PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *launcher.setup,
        # exec: the shell of the element, which receives Slurm's signals, becomes the Python process.
        f'exec {shlex.join(words)}"$SLURM_ARRAY_TASK_ID"',
    ]
    return "\n".join(lines) + "\n"


def _run_element(sweep: Sweep) -> int:
    """Run what is missing in one group; if interrupted, requeue the element, but not after scancel."""
    launcher, folders = sweep.launcher, [sweep.folder / job.name for job in sweep.jobs if job.group == sweep.only_group]

    def saved() -> set[Path]:
        return {path for folder in folders for path in (*folder.glob("*/*.pt"), *folder.glob("summary.json"))}

    before, slot = saved(), Slot(nodes=launcher.nodes, cpus_per_task=launcher.cpus_per_task)
    stop_signals, grace_s = (signal.SIGTERM, _TIME_LIMIT_SIGNAL), 0.8 * _WARNING_S
    signum = run_jobs(sweep.folder, sweep.missing_groups(), [slot], stop_signals=stop_signals, grace_s=grace_s)
    if not signum:
        return int(bool(sweep.missing_groups()))
    if signum == _TIME_LIMIT_SIGNAL and saved() == before:  # another attempt would get no further
        for folder in folders:
            if (problem_of(folder) or "").startswith("interrupted"):
                write_end(folder, f"no checkpoint within launcher.time_min={launcher.time_min}: allow more")
        return 1
    element = _own_element()
    state = subprocess.run(["squeue", "-h", "-j", element, "-o", "%T"], capture_output=True, text=True)
    if state.stdout.strip() == "RUNNING":
        print(f"requeueing Slurm job {element}", flush=True)
        subprocess.run(["scontrol", "requeue", element], check=True)
    return 128 + signum


def _own_element() -> str:
    """Slurm's id of this element of an array; SLURM_JOB_ID of the last one is the id of the array."""
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
