"""What a run says of its data: bad images, and where the time goes."""

from collections.abc import Mapping

from cl_train.data.images import listed
from cl_train.data.transforms import WorkerTimes


def bad_share(reasons: Mapping[str, str], files: int) -> str:
    return f"{len(reasons):,} of {files:,} images are bad ({100 * len(reasons) / files:.1f} %)"


def first_reasons(reasons: Mapping[str, str]) -> str:
    return listed([f"{name} ({reason})" for name, reason in reasons.items()])


def bottleneck_advice(
    times: WorkerTimes, *, workers: int, cores: int, seconds: float, data_wait_pct: float
) -> str | None:
    """Returns a sentence on the bottleneck of a window and what to change, or None."""
    if data_wait_pct <= 10 or seconds <= 0:
        return None
    waits = f"the step waits for data {data_wait_pct:.0f} % of its time"
    if times.images == 0:
        return f"{waits}; data.workers={workers}, and this process has {cores} cores"
    busy_s = times.read_s + times.decode_s + times.resize_s + times.dataset_s
    idle_pct = 100 * (1 - busy_s / (seconds * max(1, workers)))
    if times.read_s > 0.4 * busy_s:
        file_ms = 1e3 * times.read_s / times.images
        remedy = "use a local disk or a smaller copy of the data"
        cause = f"storage: reading a file takes {file_ms:.1f} ms; {remedy}"
    elif workers > 0 and idle_pct > 15:
        idle = f"workers are idle {idle_pct:.0f} % of the time"
        cause = f"the number of prepared batches: {idle}; raise data.prefetch"
    elif workers < cores:
        few = f"{max(1, workers)} of {cores} cores"
        cause = f"too few workers: {few}; use data.workers={cores}"
    elif times.dataset_s > busy_s / 2:
        cause = f"your Dataset: __getitem__ takes {1e3 * times.dataset_s / times.images:.1f} ms"
    else:
        share = f"{100 * times.decode_s / busy_s:.0f} % of the workers' time"
        cause = f"decoding, {share}; use smaller images (prepare_imagenet resize)"
    return f"{waits}; the bottleneck is {cause}"
