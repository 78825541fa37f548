"""Whole runs killed, stopped and resumed, and compared with undisturbed ones; odd folders."""

import signal
from pathlib import Path

import pytest

from tests.faults import plants, tiny
from tests.faults.bench import wait_for
from tests.processes import send_and_wait

pytestmark = pytest.mark.slow
UNSAVED = {"checkpoint__every_steps": 0}


def test_kill_training_run(bench):
    """SIGKILL of a whole run, once or more; `resume=auto` until it is done."""
    choice = bench.random.choice
    for number in range(bench.count(1, 100)):
        undisturbed = {"channels_last": choice(("true", "false")), "log_every": choice((1, 3))}
        settings = undisturbed | {"data__workers": choice((0, 1, 3))}
        reference = bench.reference(**undisturbed)
        run, saved = bench.folder / f"killed-{number}", 0
        with bench.attempt():
            for _ in range(choice((1, 2, 3))):
                running, _ = bench.hold(run, **settings)
                if bench.random.random() < 0.5:
                    running.kill_group()
                running.send(signal.SIGKILL)
                assert running.wait() == -signal.SIGKILL, f"{run.name}: {running.output()[-500:]}"
                tiny.check_loadable(run)
                before, saved = saved, tiny.newest_step(run)
                assert saved >= before, f"{run.name}: step {before} is gone"
            bench.check_resumed(run, reference, **settings)


def test_stop_signal_in_training(bench):
    """SIGTERM and SIGINT in a step: 143 or 130, saved at that step, resumed exactly."""
    reference = bench.reference()
    for number in range(bench.count(1, 50)):
        signum = bench.random.choice((signal.SIGTERM, signal.SIGINT))
        run = bench.folder / f"signal-{number}"
        settings = UNSAVED | {"data__workers": bench.random.choice((0, 2))}
        with bench.attempt():
            running, hold = bench.hold(run, **settings)
            send_and_wait(running.pid, signum)
            hold.unlink()
            told = f"{run.name}: exit code {running.wait()}: {running.output()[-300:]}"
            assert running.wait() == 128 + signum and "Traceback" not in told, told
            summary, saved = tiny.summary(run), tiny.newest_step(run)
            assert (summary["status"], summary["steps"]) == ("interrupted", saved), told
            bench.check_resumed(run, reference, **settings)


def test_signal_before_training(bench):
    """Ctrl-C before the first step: one line, no traceback."""
    with bench.attempt():
        running = bench.start(bench.folder / "signal-early", plants.slow_data)
        wait_for(running.log, content="reading the data")
        running.send(signal.SIGINT)
        code, output = running.wait(), running.output()
        assert code == 130 and "stopped before the first step" in output, output
        assert "Traceback" not in output


def test_odd_folders_and_environments(bench):
    """Odd folders and environments: success, or one message and exit code 2; never a traceback."""
    here = bench.folder / "odd"
    here.mkdir()
    (here / "file").write_text("")
    rows = [
        (here / "with space and = sign", 0, "", {}),
        (here / "\u00fcn\u00ef \u2603", 0, "", {"LANG": "C", "LC_ALL": "C", "TERM": ""}),
        (here / "file/run", 2, "cannot write|Not a directory", {}),
        (here / "clock", 0, "", {}),
        (here / "secret", 0, "", {"API_TOKEN": "s3cr3t-value"}),
    ]
    for run, code, said, environment in rows:
        with bench.attempt():
            hooks = (plants.clock_jumps_back,) if run.name == "clock" else ()
            bench.run(run, *hooks, code=code, said=said, environment=environment)
            for path in filter(Path.is_file, run.rglob("*")):
                assert b"s3cr3t-value" not in path.read_bytes(), f"{path.name} holds a secret"
