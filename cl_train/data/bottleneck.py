"""Where the loader's time goes, why the training step waits for data, and which setting to change."""

from dataclasses import dataclass, fields

WORTH_SAYING_PCT = 10.0
_STORAGE_SHARE = 0.4  # of the workers' busy time
_IDLE_PCT = 15


@dataclass
class WorkerTimes:
    """Seconds that workers spent on each part of loading."""

    read_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    images: int = 0
    dataset_s: float = 0.0  # in the user's Dataset

    def add(self, other: "WorkerTimes") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


def bottleneck_advice(
    times: WorkerTimes, *, workers: int, cores: int, seconds: float, data_wait_pct: float
) -> str | None:
    """One sentence that names the bottleneck (storage, decoding, workers, prefetch) and what to change, or None.

    Args:
        times: time that the workers of this process spent in a window of `seconds`; not known for an IterableDataset.
        cores: CPU cores for this process.
        data_wait_pct: share of the window that the step waited.
    """
    if data_wait_pct <= WORTH_SAYING_PCT or seconds <= 0:
        return None
    waits = f"the step waits for data {data_wait_pct:.0f} % of its time"
    if times.images == 0:
        return f"{waits}; data.workers={workers}, and this process has {cores} cores"
    busy_s = times.read_s + times.decode_s + times.resize_s + times.dataset_s
    idle_pct = 100 * (1 - busy_s / (seconds * max(1, workers)))
    rate = f"{times.images / busy_s:.0f} images/s per worker"
    if times.read_s > _STORAGE_SHARE * busy_s:
        read_ms = 1e3 * times.read_s / times.images
        cause = f"storage: reading a file takes {read_ms:.1f} ms; use a local disk or a smaller copy of the data"
    elif workers > 0 and idle_pct > _IDLE_PCT:
        cause = f"the number of prepared batches: workers are idle {idle_pct:.0f} % of the time; raise data.prefetch"
    elif workers < cores:
        cause = f"too few workers: {max(1, workers)} of {cores} cores ({rate}); use data.workers={cores}"
    elif times.dataset_s > busy_s / 2:
        cause = f"your Dataset: __getitem__ takes {1e3 * times.dataset_s / times.images:.1f} ms"
    else:
        decode_pct = 100 * times.decode_s / busy_s
        advice = "use a smaller copy (prepare_imagenet resize)"
        cause = f"decoding: {decode_pct:.0f} % of the workers' time ({rate}); {advice}"
    return f"{waits}; the bottleneck is {cause}"
