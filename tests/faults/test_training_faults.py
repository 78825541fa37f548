"""NaN, failing loader workers, a long run."""

import contextlib
import os
import signal
import time
from functools import partial

import pytest

from tests.faults import plants, tiny
from tests.faults.bench import peak_mib, wait_for
from tests.processes import children_of

pytestmark = pytest.mark.slow


def test_nan_in_gradient(bench):
    """NaN in a gradient of one of two ranks: both stop at its step, weights unchanged."""
    with bench.attempt():
        run, hook = bench.folder / "nan-rank1", partial(plants.bad_gradient, at_step=5)
        of_one = partial(plants.on_rank, 1, hook)
        ranks = bench.start_ranks(run, 2, of_one, on_nonfinite="stop")
        codes, outputs = [rank.wait() for rank in ranks], [rank.output() for rank in ranks]
        assert codes == [1, 1], f"{codes}: {outputs[0][-500:]}"
        # The gradients of both ranks are bad after their exchange.
        assert all("at step 5 on rank" in output for output in outputs), outputs[0][-400:]
        assert tiny.newest_step(run) == 4


def test_failing_loader_worker(bench):
    """A loader worker is killed: the run ends in bounded time and names its image."""
    for number in range(bench.count(1, 5)):
        run = bench.folder / f"worker-{number}"
        settings = {"data__workers": 2, "epochs": 10_000}
        running = bench.start(run, partial(plants.slow_steps, 20), **settings)
        with bench.attempt():
            wait_for(run / "checkpoints", content=".pt")
            time.sleep(bench.random.uniform(0, 0.2))
            workers = children_of(running.pid)[:2]  # those of the validation images start later
            assert len(workers) == 2, f"{run.name}: {len(workers)} workers found"
            os.kill(bench.random.choice(workers), signal.SIGKILL)
            code, output = running.wait(bench.patience * 15), running.output()
            is_told = all(words in output for words in ("the run failed", ".JPEG", "signal 9"))
            is_told &= "Traceback" not in output
            assert code == 1 and is_told, f"{run.name}: exit code {code}, says {output[-500:]}"
            tiny.check_loadable(run)
        running.kill_group()


def test_long_run_stays_bounded(bench):
    """10,000 steps: checkpoints rotate; memory and disk stay bounded."""
    steps, run = bench.count(None, 10_000), bench.folder / "long"
    epochs = -(-steps // tiny.STEPS_PER_EPOCH)
    settings = {"epochs": epochs, "data__workers": 1, "log_every": 6}
    settings |= {"checkpoint__every_steps": 50, "checkpoint__every_epochs": 0}
    running = bench.start(run, evaluate_every=100, **settings)
    resident = []
    while running.wait(0.05) is None:
        with contextlib.suppress(OSError, IndexError):  # the process just ended
            resident.append(peak_mib(running.pid, "VmRSS"))
    warm = len(resident) // 3  # start-up, the first epochs and the first checkpoints come before it
    growth = max(resident[warm:]) - resident[warm]
    events = sum(path.stat().st_size for path in run.glob("events.*"))
    checkpoints = len(list((run / "checkpoints").glob("*.pt")))
    with bench.attempt():
        assert running.wait() == 0, f"exit code {running.wait()}: {running.output()[-400:]}"
        assert growth < 50, f"memory grew by {growth} MiB"
        assert events < 200 * steps + 500_000, f"{events} bytes of events"
        assert checkpoints <= 4, f"{checkpoints} checkpoints"
        assert tiny.summary(run)["steps"] == epochs * tiny.STEPS_PER_EPOCH, "steps are missing"
