"""Jobs of a sweep that raise, are killed or run out of memory."""

import os
import subprocess
import sys
from pathlib import Path

import tiny
from bench import Bench
from forkserver import HERE
from outcome import Outcome

from cl_train.comparison.sweep_plan import problem_of, read_sweep

MODELS = ("tiny:model", "tiny:raising_model", "tiny:killed_model", "tiny:out_of_memory_model")


def failing_sweep_jobs(bench: Bench, rounds: int) -> Outcome:
    """The other jobs run, the record marks those that failed, the exit code says so, `resume_sweep` runs only them."""
    with Outcome("a job of a sweep raises, is killed, runs out of memory", bench.seed) as outcome:
        for number in range(rounds):
            models = MODELS if rounds > 1 else MODELS[:2]
            with outcome.attempt():
                check_sweep(bench, bench.folder / f"sweep-{number}", models)
            outcome.counts["jobs"] += len(models)
            outcome.counts["jobs that failed"] += len(models) - 1
    return outcome


def check_sweep(bench: Bench, folder: Path, models: tuple[str, ...]) -> None:
    broken = bench.folder / "broken"
    broken.write_text("")
    words = [word for word in tiny.words(bench.images, folder, model=None, resume=None) if not word.startswith("hydra")]
    sweep = ["-m", f"model={','.join(models)}", "compare_by=model", f"hydra.sweep.dir={folder}", *words]
    code, output = run_program(sweep, broken)
    assert code == 1, f"exit code {code}: {output[-500:]}"
    names = [job.name for job in read_sweep(folder).jobs]
    outcomes = [problem_of(folder / name) for name in names]
    is_told = len(names) == len(models) and outcomes[0] is None and all(outcomes[1:])
    assert is_told, f"how the jobs ended: {outcomes}"
    stamp = (folder / names[0] / "summary.json").stat().st_mtime_ns
    broken.unlink()
    code, output = run_program(["-m", f"resume_sweep={folder}"], broken)
    assert code == 0, f"resume_sweep: exit code {code}: {output[-500:]}"
    assert not any(problem_of(folder / name) for name in names), "a job has a problem in the end"
    assert (folder / names[0] / "summary.json").stat().st_mtime_ns == stamp, "the completed job ran again"


def run_program(words: list[str], broken: Path) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{tiny.REPOSITORY}", "OMP_NUM_THREADS": "1"}
    environment |= {"PLANT_BROKEN": str(broken)}
    command = [sys.executable, str(tiny.REPOSITORY / "train.py"), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=tiny.REPOSITORY)
    return result.returncode, result.stdout + result.stderr
