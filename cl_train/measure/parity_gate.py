"""Before a run or `auto` uses channels_last, what both layouts compute is compared.

The result is kept for later runs; `parity=false` leaves the comparison out.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.kept import keep, kept_file, read_kept
from cl_train.measure.parity import MODES, parity_of
from cl_train.measure.timed_step import Workload
from cl_train.memory_format.convert import Layout
from cl_train.system.machine import release_memory

log = logging.getLogger(__name__)

MOST_IMAGES = 4  # of the step that is checked; 3 for a larger odd batch, whose kernels differ


@dataclass(frozen=True)
class Parity:
    """Whether both layouts of a run's step compute the same; None: unknown, for the reason."""

    passed: bool | None
    text: str = ""
    fails: bool = False  # channels_last raises, and contiguous does not

    @property
    def difference(self) -> str:
        return f"channels_last {'fails' if self.fails else 'computes something else'}: {self.text}"

    @property
    def status(self) -> str:
        """The text in `summary.json`."""
        if self.passed or self == OFF:
            return "passed" if self.passed else "off"
        return f"{'inconclusive' if self.passed is None else 'different'}: {self.text}"


OFF = Parity(None, "off")  # parity=false


def parity_before_use(
    model: nn.Module, workload: Workload, layout: Layout, parity: str = "auto"
) -> Parity:
    """Compares the layouts in the step of `workload`.

    `parity`: "auto" takes what an earlier run found, "true" compares again, "false" does not.
    """
    if parity == "false":
        return OFF
    count = workload.batch_size
    count = count if count <= MOST_IMAGES else MOST_IMAGES - count % 2
    settings = replace(workload.settings, accumulate_steps=1, cuda_graph=False)
    checked = replace(workload, batch_size=count, settings=settings)
    path = kept_file("parity", model, checked, layout)
    kept: Any = read_kept(path) if parity == "auto" else {}
    if {"passed", "text", "fails"} <= kept.keys():
        return Parity(kept["passed"], str(kept["text"]), bool(kept["fails"]))

    started_at = time.perf_counter()
    try:
        report = parity_of(
            model, checked, layout, MODES["infer" if workload.mode == "infer" else "both"]
        )
    except ConfigError as error:
        return Parity(None, str(error))
    finally:
        release_memory()
    seconds = time.perf_counter() - started_at
    text = report.note if report.passed is None else report.first_divergence or ""
    fails = report.passed is False and not report.failed
    if report.passed is not None and not fails:
        log.info("parity: both layouts compared in %.1f s; the result is kept", seconds)
    found = Parity(report.passed, report.failed[0] if report.failed else text, fails)
    keep(path, vars(found), "parity")
    return found
