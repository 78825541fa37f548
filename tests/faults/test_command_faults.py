"""Wrong settings and words, odd folders and environments, and sweeps whose jobs fail or whose
launcher is killed.
"""

import contextlib
import os
import shlex
import signal
import string
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from cl_train.config.command_line import GROUPS, check_command_line
from cl_train.config.schema import CHOSEN_BY_GROUP, Config, ConfigError
from cl_train.config.validation import Setting, setting_fields
from cl_train.sweeps.job import problem_of
from cl_train.sweeps.plan import read_sweep
from tests.faults import plants, tiny
from tests.faults.bench import MAX_ORPHAN_S, Bench, check_ended, mounted
from tests.faults.forkserver import Forked, train_script
from tests.processes import running_processes, wait_until

pytestmark = pytest.mark.slow


def wrong_values(item: Setting) -> Iterator[str]:
    """Values that the setting cannot take, by its declared type and range."""
    metadata, base = item.metadata, item.base_type.__name__
    if item.list_depth:
        yield from ("[a,b,c]", "[[1]]", "{a:1}") if base == "float" else ()
        return
    if base in ("int", "float"):
        yield from ("many", "[1,2]", "nan", "inf", "''", "true", "{a:1}")
        for name, outside in (("minimum", -1), ("above", 0), ("maximum", 1)):
            if metadata[name] is not None:
                yield str(metadata[name] + outside * (1 if base == "int" else 0.5))
    if base == "int":
        yield from ("1.5", "x" * 300)
    if base == "bool":
        yield from ("maybe", "3", "[true]", "''")
    if base == "str" and metadata["choices"]:
        yield from ("nonsense", "3", "[a]", "''", metadata["choices"][-1] + "x")
    if not item.optional:
        yield "null"


def test_wrong_setting_values(bench: Bench) -> None:
    """A setting with a wrong value: a ConfigError that names it, at most one screen, no other
    exception.
    """
    settings = {
        key: item for key, item in setting_fields(Config).items() if key not in CHOSEN_BY_GROUP
    }
    cases = [
        (f"{key}={value}", key) for key, item in settings.items() for value in wrong_values(item)
    ]
    bench.random.shuffle(cases)
    for word, name in [*cases[: bench.count(15, None)], *((word, "") for word in HOSTILE_WORDS)]:
        with bench.attempt():
            text = "\n".join(refusal(word))
            assert name in text, f"{word[:80]}: the message does not name {name}: {text[:200]}"
            is_short = text.count("\n") < 24 and len(text) <= 3000 + 2 * len(word[:80]) + len(word)
            assert text.strip() and is_short, f"{word[:80]}: a message of {len(text)} characters"


HOSTILE_WORDS = (
    "+model._target_=os.system", "++optim._target_=os.system", "model._target_=os.system",
    "+optim={_target_:os.system,command:id}", "optim={_target_:os.system}", "=3", "epochs",
    "epochs=", "~epochs",
    "epochs=1,2", "data=nonsense", "experiment=../../etc/passwd", "data=/etc/passwd",
    "batch_size=${oc.env:NO_SUCH_VARIABLE}", "batch_size=${nonsense}", "batch_size=${batch_size}",
    "epochs={",
    "\x00=1", "epochs=\u0661\u0662", "é=1", "a" * 5000 + "=1", "--epochs=3",
    "--config-name=nothing",
)  # fmt: skip


def refusal(word: str) -> list[str]:
    """What the command line is refused with."""
    with pytest.raises(ConfigError) as caught:
        check_command_line([word])
        pytest.fail(f"{word[:80]}: accepted")
    return caught.value.problems


def test_misspelt_settings(bench: Bench) -> None:
    """One typing error in the key of a setting or group: the right one is among the suggestions for
    95 % of them.
    """
    known, wrong, count = {*setting_fields(Config), *GROUPS}, [], 0
    for key in sorted(known):
        for _ in range(bench.count(None, 10)):
            place, letter = (
                bench.random.randrange(len(key)),
                bench.random.choice(string.ascii_lowercase + "_"),
            )
            start, rest = (
                key[:place],
                key[place:],
            )  # a letter left out, doubled, swapped, replaced or added
            edits = (
                rest[1:],
                rest[0] + rest,
                rest[1::-1] + rest[2:],
                letter + rest[1:],
                letter + rest,
            )
            edited = start + bench.random.choice(edits)
            if (
                edited
                and edited not in known
                and not edited.startswith((".", "-"))
                and ".." not in edited
            ):
                text = refusal(f"{edited}=1")[0]
                suggested = text.partition("did you mean ")[2].rstrip("?").split(", ")
                wrong += [] if key in suggested else [f"{edited} instead of {key}: {text}"]
                count += 1
    with bench.attempt():
        assert len(wrong) <= 0.05 * count, wrong


def test_odd_folders_and_environments(bench: Bench) -> None:
    """Odd folders and environments: success, or one message and exit code 2; never a traceback."""
    here, c_locale = bench.folder / "odd", {"TERM": "", "LANG": "C", "LC_ALL": "C"}
    here.mkdir()
    (here / "file").write_text("")
    rows: list[tuple[Path, int, str, dict[str, str]]] = [
        (here / "with space and = sign", 0, "", {}),
        (here / "ünï ☃", 0, "", {}),
        (here / "file/run", 2, "cannot write|Not a directory", {}),
        (Path("/proc/nowhere"), 2, "cannot write|No such file", {}),
        (here / "clock", 0, "", {}),
        (here / "home", 0, "", {"HOME": ""} | c_locale),
        (here / "home2", 0, "", {"HOME": "/nonexistent", "COLUMNS": "0"}),
        (here / "secret", 0, "", {"API_TOKEN": "s3cr3t-value"}),
    ]
    for run, code, said, environment in rows:
        with bench.attempt():
            hooks = (plants.clock_jumps_back,) if run.name == "clock" else ()
            bench.run(run, *hooks, code=code, said=said, environment=environment)
            for path in run.rglob(
                "*"
            ):  # configurations and summaries must not hold the environment
                assert not (path.is_file() and b"s3cr3t-value" in path.read_bytes()), (
                    f"{path.name} holds a secret"
                )
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
                    assert running.wait() in codes and "Traceback" not in running.output(), (
                        name,
                        running.output(),
                    )


MODELS = (
    "tests.networks:dropout",
    *(f"tests.faults.plants:{name}" for name in ("raising", "killed", "out_of_memory")),
)


def start_sweep(
    bench: Bench, folder: Path, *words: str, environment: Mapping[str, str], **settings: object
) -> Forked:
    """`train.py -m ...`, whose jobs are programs of their own."""
    shared = [
        word
        for word in bench.words(folder, resume=None, **settings)
        if not word.startswith("hydra")
    ]
    once = ("max_reruns=0", "wait_for_quiet_s=0")
    words = ("-m", f"hydra.sweep.dir={folder}", *words, *once, *shared)
    return bench.fork(partial(train_script, words), environment)


def check_sweep_resumed(bench: Bench, folder: Path) -> None:
    words = shlex.split(read_sweep(folder).resume_command())  # with the code that the jobs name
    again = bench.fork(partial(train_script, words[words.index("-m") :]))
    assert again.wait() == 0, f"resume_sweep: exit code {again.wait()}: {again.output()[-500:]}"


def test_failing_sweep_jobs(bench: Bench) -> None:
    """Jobs that raise, are killed, run out of memory: the others run, exit code 1, `resume_sweep`
    runs only them.
    """
    for number in range(bench.count(None, 3)):
        folder, broken = bench.folder / f"sweep-{number}", bench.folder / "broken"
        broken.touch()
        words = [f"model={','.join(MODELS)}", "compare_by=model"]
        with bench.attempt():
            sweep = start_sweep(
                bench, folder, *words, environment={"PLANT_BROKEN": str(broken)}, model=None
            )
            assert sweep.wait() == 1, f"exit code {sweep.wait()}: {sweep.output()[-500:]}"
            names = [job.name for job in read_sweep(folder).jobs]
            outcomes = [problem_of(folder / name) for name in names]
            assert len(names) == len(MODELS) and outcomes[0] is None and all(outcomes[1:]), outcomes
            stamp = (folder / names[0] / "summary.json").stat().st_mtime_ns
            broken.unlink()
            check_sweep_resumed(bench, folder)
            assert not any(problem_of(folder / name) for name in names), (
                "a job has a problem in the end"
            )
            assert (folder / names[0] / "summary.json").stat().st_mtime_ns == stamp, (
                "the completed job ran again"
            )


def test_kill_sweep_launcher(bench: Bench) -> None:
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
            wait_until(
                lambda: any("train" in path.read_text() for path in folder.glob("*/metrics.jsonl"))  # noqa: B023
            )
            time.sleep(bench.random.uniform(0, 0.4))
        launcher.send(signal.SIGKILL)
        launcher.wait()
        with bench.attempt():
            check_ended(partial(running_in_folder, folder), bench.patience * MAX_ORPHAN_S)
            check_sweep_resumed(bench, folder)
            losses = [list(tiny.losses(path.parent)) for path in folder.glob("*/metrics.jsonl")]
            assert losses == 2 * [list(range(2, tiny.STEPS + 1, 2))], losses  # each window once


def running_in_folder(folder: Path) -> list[int]:
    """Processes whose command line names the folder, in any session."""
    found = []
    for pid in running_processes():
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
