"""Parity before use: no run, and no choice of `auto`, uses channels_last unasked."""

import logging
import time
from dataclasses import replace

from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.kept import keep, kept_file, read_kept
from cl_train.measure.parity import MODES, parity_of
from cl_train.measure.timed_step import Workload
from cl_train.memory_format.convert import Layout
from cl_train.system.machine import release_memory

log = logging.getLogger(__name__)

MOST_IMAGES = 4  # of the step that is checked: odd for an odd batch, for which kernels differ
DIFFERENT = "different: "


def parity_before_use(
    model: nn.Module, workload: Workload, layout: Layout, parity: str = "auto"
) -> str:
    """Compare the layouts in the step of `workload`, with at most `MOST_IMAGES` images: "passed",
    "inconclusive: why", "off" (as in `summary.json`), or `DIFFERENT` and what is.

    `parity`: "auto" takes what an earlier run found, "true" compares again, "false" does not.
    """
    if parity == "false":
        return "off"
    count = workload.batch_size
    count = count if count <= MOST_IMAGES else MOST_IMAGES - count % 2
    settings = replace(workload.settings, accumulate_steps=1, cuda_graph=False)
    checked = replace(workload, batch_size=count, settings=settings)
    path = kept_file("parity", model, checked, layout)
    kept = read_kept(path) if parity == "auto" else {}
    if not (status := str(kept.get("parity", ""))):
        started_at = time.perf_counter()
        try:
            modes = MODES["infer" if workload.mode == "infer" else "both"]
            report = parity_of(model, checked, layout, modes)
        except ConfigError as error:
            return _warned(f"inconclusive: {error}")
        finally:
            release_memory()
        seconds = time.perf_counter() - started_at
        log.info("parity: both layouts compared in %.1f s; the result is kept", seconds)
        status = "passed" if report.passed else f"inconclusive: {report.note}"
        if report.passed is False:
            what = report.failed[0] if report.failed else report.first_divergence
            status = f"{DIFFERENT}{what}"
        keep(path, {"parity": status}, "parity")
    return _warned(status)


def _warned(status: str) -> str:
    if status.startswith("inconclusive"):
        log.warning("parity: %s", status)
    return status
