"""Why the step waits for data, and which setting to change."""

from __future__ import annotations

import os

from cl_train.data.images import Times

WORTH_SAYING_PCT = 10.0
_DISK_SHARE = 0.4  # of the workers' time spent reading files
_BUSY_SHARE = 0.85  # of the workers' wall time


def bottleneck_advice(
    times: Times, *, workers: int, seconds: float, data_wait_pct: float, cores: int | None = None
) -> str | None:
    """One sentence that names the bottleneck (disk, decoding, workers, bus) and the setting to change, or None.

    Args:
        times: what the workers did in the window (the difference of `Data.times` at its ends).
        workers: of this process. seconds: length of the window. data_wait_pct: share of it that the step waited.
        cores: usable cores of this process; counted if None.
    """
    if data_wait_pct <= WORTH_SAYING_PCT or times.images == 0 or seconds <= 0:
        return None
    cores = cores if cores is not None else len(os.sched_getaffinity(0))
    busy_s = times.read_s + times.decode_s + times.resize_s
    busy = busy_s / (seconds * max(1, workers))
    per_worker = times.images / busy_s
    head = f"the step waits {data_wait_pct:.0f} % of its time for data; "
    if times.read_s > _DISK_SHARE * busy_s:
        rate = times.read_s / times.images * 1e3
        return (
            f"{head}the disk is the bottleneck: a file takes {rate:.1f} ms to read; use a local disk, or a resized copy"
        )
    if busy < _BUSY_SHARE and workers > 0:
        return (
            f"{head}the workers are idle {100 * (1 - busy):.0f} % of the time, so the bus or the hand-over is the"
            " bottleneck; raise data.prefetch and data.device_prefetch"
        )
    if workers < cores:
        return (
            f"{head}the workers are the bottleneck: {max(1, workers)} on {cores} cores, {per_worker:.0f} images/s each;"
            f" use data.workers={cores}"
        )
    share = 100 * times.decode_s / busy_s
    return (
        f"{head}decoding is the bottleneck: {share:.0f} % of the workers' time, {per_worker:.0f} images/s per core;"
        " use a resized copy (scripts/prepare_imagenet.py resize), data.exact_decode=false, or data.decode=gpu"
    )
