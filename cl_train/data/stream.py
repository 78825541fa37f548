"""An IterableDataset of the user, through a plain `torch.utils.data.DataLoader`. It controls its
order, and a resumed epoch begins anew.
"""

import itertools
import logging
import math
import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from cl_train.data.device import RawBatch
from cl_train.data.loader import BadImages, DataSettings, WorkerTimes
from cl_train.data.transforms import seeded_everywhere
from cl_train.data.user_dataset import SampleForm, check_first, reason_of
from cl_train.data.workers import ignore_parents_signals, killing_at_exit
from cl_train.errors import ConfigError, WorkerError
from cl_train.system.processes import handles_signals

log = logging.getLogger(__name__)


class StreamLoader(IterableDataset[Any]):
    """Has the public members of `HostLoader`; `sample_count`: of all ranks and workers together.

    The workers iterate over it: they yield (pixels [size, size, 3], label) of a good sample, and
    (name, reason) of a bad one.
    """

    times = WorkerTimes()  # not measured

    def __init__(
        self, dataset: Any, form: SampleForm, settings: DataSettings, bad_images: BadImages
    ) -> None:
        check_first(form, lambda: next(iter(dataset)), settings.data.worker_timeout_s)
        self.sample_count, self.label_shape = len(dataset), form.label_shape
        self.workers = settings.workers
        self._dataset, self._form = dataset, form
        self._settings, self._bad_images = settings, bad_images
        self._is_training = form.transform.training
        self._has_ended_early = False
        self._epoch = 0
        if self._is_training and settings.augment.repeats > 1:
            raise ConfigError(
                "augment.repeats does not work with an IterableDataset: it controls its own order"
            )
        if self._is_training and settings.dist.is_main:
            log.warning("an IterableDataset controls its order: resume is not exact")

    def batch_count(self) -> int:
        return self._settings.batch_count(self.sample_count, training=self._is_training)

    def start(self) -> None:
        """Does nothing: the workers live for an epoch."""

    def close(self) -> None:
        """Does nothing."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        form, dist, stream = self._form, self._settings.dist, iter(self._dataset)
        for number in itertools.count():
            index = (number * workers + worker) * dist.world_size + dist.rank
            pixels = torch.empty(form.size, form.size, 3, dtype=form.dtype)
            try:
                with seeded_everywhere(form.transform.seed, self._epoch, index):
                    sample = next(stream)
                label = form.write(pixels.permute(2, 0, 1), sample, self._epoch, index)
            except StopIteration:
                return
            except Exception as error:
                yield f"{form.name(number)} in worker {worker}", reason_of(error)
            else:
                yield pixels, label

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields the samples; in training full batches, `batch_count()` in an epoch, of a stream
        that begins again when it ends early. Raises BadImageError, WorkerError.
        """
        end = self.batch_count() if self._is_training else math.inf
        number = first_batch
        seen = 0
        while number < end:
            begin = number
            for images, targets in self._read(epoch):
                yield RawBatch(images.permute(0, 3, 1, 2), targets, number, epoch)
                number += 1
                seen += len(targets)
                if number == end or seen > self.sample_count:  # the evaluation refuses so many
                    return
            if not self._is_training:
                return
            if number == begin:
                reasons = "; ".join(self._bad_images.reasons.values())
                raise WorkerError(
                    f"data.dataset: the workers get fewer than {self._settings.batch_size} good"
                    f" training samples, a batch. {reasons}"
                )
            if not self._has_ended_early:
                self._has_ended_early = True
                log.warning(
                    f"data.dataset ended after {number} of {end} batches and begins again: some"
                    " samples are seen twice in the epoch"
                )

    def _read(self, epoch: int) -> Iterator[list[Tensor]]:
        """Yields the stream once, images [N, size, size, 3] and labels; in training the smaller
        batches of the workers are joined to full ones. Raises BadImageError, WorkerError.
        """
        full = self._settings.batch_size
        rest = list[Any]()
        loaded, kill = self._start_workers(epoch)
        try:
            for batch, bad in _next_of(loaded):
                for name, reason in bad:
                    self._bad_images.add(name, reason, skipped=True)
                if batch and (len(batch[1]) == full or not self._is_training):
                    yield batch
                    continue
                rest += zip(*batch, strict=True)
                if len(rest) >= full:
                    yield default_collate(rest[:full])
                    rest = rest[full:]
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold `loaded`
            if type(error) is RuntimeError:  # a worker died or hangs
                raise WorkerError(f"data.dataset: {' '.join(str(error).split())}") from None
            raise
        finally:
            del loaded  # torch ends its workers
            kill()  # one that hangs: it ignores SIGTERM

    def _start_workers(self, epoch: int) -> tuple[Iterator[Any], Callable[[], object]]:
        """Returns what the workers collate, and a function that kills them."""
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        cfg = self._settings.data
        count = self.workers
        before = multiprocessing.active_children()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than cores, and of their fork
            loader = DataLoader(
                self,
                self._settings.batch_size,
                num_workers=count,
                collate_fn=_collate,
                pin_memory=self._settings.dist.device.type == "cuda",
                generator=torch.Generator(),  # the training's own numbers stay as they are
                timeout=cfg.worker_timeout_s if count else 0,
                multiprocessing_context="fork" if count else None,
                prefetch_factor=max(1, cfg.prefetch // count) if count else None,
                worker_init_fn=lambda worker: ignore_parents_signals(),
            )
            loaded = iter(loader)
        workers = [child for child in multiprocessing.active_children() if child not in before]
        return loaded, killing_at_exit(None, workers)


def _next_of(loaded: Iterator[Any]) -> Iterator[Any]:
    """Yields of `loaded`, whose workers' deaths raise RuntimeError here.

    By itself torch's handler of SIGCHLD raises it anywhere, such as within a training step.
    """
    raise_if_dead = signal.getsignal(signal.SIGCHLD)
    if not handles_signals() or not callable(raise_if_dead):
        yield from loaded
        return
    is_waiting = False

    def handle(signum: int, frame: Any) -> None:
        if is_waiting:
            raise_if_dead(signum, frame)

    signal.signal(signal.SIGCHLD, handle)
    try:
        while True:
            is_waiting = True
            raise_if_dead(signal.SIGCHLD, None)
            item = next(loaded, None)
            is_waiting = False
            if item is None:
                return
            yield item
    finally:
        is_waiting = False
        signal.signal(signal.SIGCHLD, raise_if_dead)


def _collate(samples: list[tuple[Any, Any]]) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Returns images and labels of the good samples, or nothing, and the bad ones."""
    good = [sample for sample in samples if isinstance(sample[0], Tensor)]
    bad = [sample for sample in samples if isinstance(sample[0], str)]
    return default_collate(good) if good else [], bad
