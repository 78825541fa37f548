"""`profile=true`: a torch.profiler trace of a few steps, for https://ui.perfetto.dev."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SKIPPED_STEPS = 5
WARMUP_STEPS = 2
TRACED_STEPS = 3


@contextmanager
def profile(folder: Path | None, device: torch.device) -> Iterator[Callable[[], object]]:
    """Trace three steps after the first seven; call the returned function once per optimizer step.

    Writes `trace.json.gz` and a table of the operators, `operators.txt`, into `folder`; None = no profile.
    """
    if folder is None:
        yield lambda: None
        return
    trace = folder / "trace.json.gz"

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=40)
        (folder / "operators.txt").write_text(table, encoding="utf-8")
        log.info("profile of %d steps: %s (open it at ui.perfetto.dev)", TRACED_STEPS, trace)

    schedule = torch.profiler.schedule(wait=SKIPPED_STEPS, warmup=WARMUP_STEPS, active=TRACED_STEPS, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True) as profiler:
        yield profiler.step
    if not trace.is_file():
        steps = SKIPPED_STEPS + WARMUP_STEPS + TRACED_STEPS
        log.warning("profile=true: no profile was taken; it needs a run of at least %d steps", steps)
