"""`profile=true`: a torch.profiler trace of a few steps, for https://ui.perfetto.dev."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cl_train.config.schema import Config
from cl_train.system.distributed import Dist

log = logging.getLogger(__name__)

SKIPPED_STEPS = 5
WARMUP_STEPS = 2
TRACED_STEPS = 3


class NoProfile:
    def step(self) -> None:
        pass


@contextmanager
def profile(cfg: Config, folder: Path, dist: Dist) -> Iterator[torch.profiler.profile | NoProfile]:
    """Trace three steps after the first seven, on rank 0; call `step` once per optimizer step.

    Leaves `trace.json.gz` and a table of the operators, `operators.txt`, in the run folder.
    """
    if not cfg.profile or not dist.is_main:
        yield NoProfile()
        return

    written: list[bool] = []

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        key = "self_device_time_total" if dist.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=40)
        (folder / "operators.txt").write_text(table, encoding="utf-8")
        written.append(True)
        log.info("profile of %d steps: %s (open it at ui.perfetto.dev)", TRACED_STEPS, folder / "trace.json.gz")

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=SKIPPED_STEPS, warmup=WARMUP_STEPS, active=TRACED_STEPS, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    ) as profiler:
        yield profiler
    if not written:
        steps = SKIPPED_STEPS + WARMUP_STEPS + TRACED_STEPS
        log.warning("profile=true: no profile was taken, as that needs a run of at least %d steps", steps)
