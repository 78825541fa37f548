"""Wrong settings and words, odd folders and environments, and sweeps whose jobs fail or whose
launcher is killed.
"""

import contextlib
import os
import shlex
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from cl_train.config.command_line import check_command_line
from cl_train.config.fields import setting_fields
from cl_train.config.schema import CHOSEN_BY_GROUP, Config
from cl_train.config.validation import show
from cl_train.errors import ConfigError
from cl_train.sweeps.launch import missing_jobs
from cl_train.sweeps.plan import read_sweep
from tests.faults import plants, tiny
from tests.faults.bench import MAX_ORPHAN_S, check_ended, mounted
from tests.faults.forkserver import train_script
from tests.processes import running_processes, wait_until

pytestmark = pytest.mark.slow
WORDS = (
    "++optim._target_=os.system", "model._target_=os.system", "optim={_target_:os.system}", "=3",
    "epochs", "epochs=", "data=nonsense", "experiment=../../etc/passwd", "data=/etc/passwd",
    "batch_size=${nonsense}", "batch_size=${batch_size}", "epochs={", "\x00=1", "\u00e9=1",
    "epochs=\u0661\u0662", "a" * 5000 + "=1", "--config-name=nothing",
)  # fmt: skip


def wrong_values(item):
    """Values that the setting cannot take, by its declared type and range."""
    metadata, base = item.metadata, item.base_type
    if item.list_depth:
        yield from ("[a,b,c]", "[[1]]", "{a:1}") if base is float else ()
        return
    if base in (int, float):
        yield from ("many", "[1,2]", "nan", "inf", "''", "true", "{a:1}")
        outside = {">=": -1, ">": 0, "<=": 1}
        for sign, limit in item.bounds:
            yield show(limit + outside[sign] * max(1, abs(limit)))
    if base is int:
        yield "1.5"
    if base is bool:
        yield from ("maybe", "3", "[true]", "''")
    if base is str and metadata["choices"]:
        yield from ("nonsense", "3", "[a]", "''")
    if not item.optional:
        yield "null"


def test_wrong_setting_values(bench):
    """A setting with a wrong value is refused by name, in one screen, and so are odd words."""
    settings = setting_fields(Config).items()
    cases = [
        (f"{key}={value}", key)
        for key, item in settings
        for value in wrong_values(item)
        if key not in CHOSEN_BY_GROUP
    ]
    bench.random.shuffle(cases)
    for word, name in [*cases[: bench.count(15, None)], *((word, "") for word in WORDS)]:
        with bench.attempt():
            with pytest.raises(ConfigError, match=name or None) as caught:
                check_command_line([word])
                pytest.fail(f"{word[:80]}: accepted")
            text = str(caught.value)
            assert text.strip() and text.count("\n") < 24, f"{word[:80]}: {text[:200]}"


def test_odd_folders_and_environments(bench):
    """Odd folders and environments: success, or one message and exit code 2; never a traceback."""
    here = bench.folder / "odd"
    here.mkdir()
    (here / "file").write_text("")
    rows = [
        (here / "with space and = sign", 0, "", {}),
        (here / "\u00fcn\u00ef \u2603", 0, "", {"LANG": "C", "LC_ALL": "C", "TERM": ""}),
        (here / "file/run", 2, "cannot write|Not a directory", {}),
        (Path("/proc/nowhere"), 2, "cannot write|No such file", {}),
        (here / "clock", 0, "", {}),
        (here / "home", 0, "", {"HOME": "/nonexistent", "COLUMNS": "0"}),
        (here / "secret", 0, "", {"API_TOKEN": "s3cr3t-value"}),
    ]
    for run, code, said, environment in rows:
        with bench.attempt():
            hooks = (plants.clock_jumps_back,) if run.name == "clock" else ()
            bench.run(run, *hooks, code=code, said=said, environment=environment)
            for path in filter(Path.is_file, run.rglob("*")):
                assert b"s3cr3t-value" not in path.read_bytes(), f"{path.name} holds a secret"
    for name, options, codes in (  # real file systems
        ("full", "size=64k", (1, 2)),
        ("no-inodes", "size=8m,nr_inodes=2", (2,)),
        ("read-only", "size=8m,ro", (2,)),
    ):
        (here / name).mkdir()
        with mounted(here / name, options) as is_mounted:
            if is_mounted:
                running = bench.start(here / name / "run", plants.short_retries)
                with bench.attempt():
                    code, output = running.wait(), running.output()
                    assert code in codes and "Traceback" not in output, (name, output)


# --- sweeps ---------------------------------------------------------------------------------------

BROKEN = [f"tests.faults.plants:{name}" for name in ("raising", "killed", "out_of_memory")]
MODELS = ["tests.networks:dropout", *BROKEN]


def start_sweep(bench, folder, *words, environment, **settings):
    """`train.py -m ...`, whose jobs are programs of their own."""
    shared = bench.words(folder, resume=None, hydra__run__dir=None, **settings)
    once = ("max_reruns=0", "wait_for_quiet_s=0")
    words = ("-m", f"hydra.sweep.dir={folder}", *words, *once, *shared)
    return bench.fork(partial(train_script, words), environment)


def check_sweep_resumed(bench, folder):
    words = shlex.split(read_sweep(folder).resume_command())  # with the code that the jobs name
    again = bench.fork(partial(train_script, words[words.index("-m") :]))
    assert again.wait() == 0, f"resume_sweep: exit code {again.wait()}: {again.output()[-500:]}"


def test_failing_sweep_jobs(bench):
    """Jobs that raise, are killed, run out of memory: the others run, exit code 1, `resume_sweep`
    runs only them.
    """
    for number in range(bench.count(None, 3)):
        folder, broken = bench.folder / f"sweep-{number}", bench.folder / "broken"
        broken.touch()
        words = [f"model={','.join(MODELS)}", "compare_by=model"]
        environment = {"PLANT_BROKEN": str(broken)}
        with bench.attempt():
            sweep = start_sweep(bench, folder, *words, environment=environment, model=None)
            assert sweep.wait() == 1, f"exit code {sweep.wait()}: {sweep.output()[-500:]}"
            jobs = read_sweep(folder).jobs
            assert len(jobs) == len(MODELS) and missing_jobs(read_sweep(folder)) == jobs[1:]
            summary = folder / jobs[0].name / "summary.json"
            stamp = summary.stat().st_mtime_ns
            broken.unlink()
            check_sweep_resumed(bench, folder)
            assert missing_jobs(read_sweep(folder)) == []
            assert summary.stat().st_mtime_ns == stamp, "it ran again"


def test_kill_sweep_launcher(bench):
    """The launcher of a sweep killed: its job ends, and `resume_sweep` completes the sweep with
    every step once.
    """
    for number in range(bench.count(None, 10)):
        folder = bench.folder / f"launcher-{number}"
        settings = {"model": "tests.faults.plants:Slow", "checkpoint__every_steps": 0}
        settings |= {"nproc": 2, "batch_size": 4} if number % 5 == 4 else {}  # the job is torchrun
        launcher = start_sweep(
            bench, folder, "channels_last=false,true", environment={"PLANT_MS": "60"}, **settings
        )
        wait_until(lambda: any(folder.glob("*/job.log")))  # noqa: B023
        if number % 3:  # else at the job's start
            metrics = partial(folder.glob, "*/metrics.jsonl")
            wait_until(lambda: any("train" in path.read_text() for path in metrics()))  # noqa: B023
            time.sleep(bench.random.uniform(0, 0.4))
        launcher.send(signal.SIGKILL)
        launcher.wait()
        with bench.attempt():
            check_ended(partial(running_in_folder, folder), bench.patience * MAX_ORPHAN_S)
            check_sweep_resumed(bench, folder)
            losses = [list(tiny.losses(path.parent)) for path in folder.glob("*/metrics.jsonl")]
            assert losses == 2 * [list(range(2, tiny.STEPS + 1, 2))], losses  # each window once


def running_in_folder(folder):
    """Processes whose command line names the folder, in any session."""
    found = []
    for pid in running_processes():
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
