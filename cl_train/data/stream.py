"""An IterableDataset of the user, through a plain `torch.utils.data.DataLoader`. It controls its
order, and a resumed epoch begins anew.
"""

import itertools
import logging
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool
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
        self.sample_count, self.workers = len(dataset), settings.workers
        self._dataset, self._form = dataset, form
        self._settings, self._bad_images = settings, bad_images
        self._is_training = form.transform.training
        self._has_ended_early = False
        if self._is_training and settings.augment.repeats > 1:
            raise ConfigError(
                "augment.repeats does not work with an IterableDataset: it controls its own order"
            )
        if self._is_training and settings.dist.is_main:
            log.warning("an IterableDataset controls its order: resume is not exact")

    def batch_count(self) -> int:
        return self._settings.batch_count(self.sample_count, training=self._is_training)

    def start(self) -> None:
        """Does nothing: workers live for an epoch."""

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
                yield pixels, form.write(pixels.permute(2, 0, 1), sample, self._epoch, index)
            except StopIteration:
                return
            except Exception as error:
                yield f"{form.name(number)} in worker {worker}", reason_of(error)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields the samples; in training full batches, `batch_count()` in an epoch.

        Raises BadImageError; WorkerError: a worker died or hangs.
        """
        numbers = range(first_batch, self.batch_count()) if self._is_training else itertools.count()
        seen = 0
        for number, (images, targets) in zip(numbers, self._stream(epoch), strict=False):
            yield RawBatch(images.permute(0, 3, 1, 2), targets, number, epoch)
            seen += len(targets)
            if seen > self.sample_count:  # the evaluation refuses so many
                return

    def _stream(self, epoch: int) -> Iterator[list[Tensor]]:
        """Yields images [N, size, size, 3] and labels; in training the stream begins again."""
        while True:
            count = 0
            for batch in self._batches_of_stream(epoch):
                yield batch
                count += 1
            if not self._is_training:
                return
            if count == 0:
                reasons = "; ".join(self._bad_images.reasons.values())
                raise WorkerError(
                    f"data.dataset: the workers get fewer than {self._settings.batch_size} good"
                    f" training samples, a batch. {reasons}"
                )
            if not self._has_ended_early:
                self._has_ended_early = True
                log.warning(
                    f"data.dataset ended after {count} of {self.batch_count()} batches and begins"
                    " again: some samples are seen twice in the epoch"
                )

    def _batches_of_stream(self, epoch: int) -> Iterator[list[Tensor]]:
        """In training, joins the smaller batches of the workers to full ones."""
        full = self._settings.batch_size
        rest = list[Any]()
        for batch, bad in self._collated(epoch):
            for name, reason in bad:
                self._bad_images.add(name, reason, skipped=True)
            if batch and (len(batch[1]) == full or not self._is_training):
                yield batch
                continue
            rest += zip(*batch, strict=True)
            if len(rest) >= full:
                yield default_collate(rest[:full])
                rest = rest[full:]

    def _collated(self, epoch: int) -> Iterator[Any]:
        """Yields what the workers collate."""
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if self.workers == 0:
            yield from self._torch_loader()
            return
        timeout_s = self._settings.data.worker_timeout_s
        before = set(multiprocessing.active_children())
        # In the main thread torch raises for a dead worker anywhere, such as within a step.
        with ExitStack() as stack:
            thread = stack.enter_context(ThreadPool(1))
            if handles_signals():  # and for another loader, too
                handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
                stack.callback(signal.signal, signal.SIGCHLD, handler)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of many workers, and of their fork
                loaded = thread.apply(lambda: iter(self._torch_loader()))
            kill = killing_at_exit(None, list(set(multiprocessing.active_children()) - before))
            try:
                while item := thread.apply_async(next, (loaded, None)).get(timeout_s):
                    yield item
            except multiprocessing.TimeoutError:
                raise WorkerError(
                    f"data.dataset: the workers sent no batch for {timeout_s:g} s. If the storage"
                    " is slow, raise data.worker_timeout_s."
                ) from None
            except RuntimeError as error:
                raise WorkerError(f"data.dataset: {' '.join(str(error).split())}") from None
            finally:
                del loaded  # torch ends its workers
                kill()  # one that hangs ignores SIGTERM

    def _torch_loader(self) -> DataLoader[Any]:
        count = self.workers
        return DataLoader(
            self,
            self._settings.batch_size,
            num_workers=count,
            collate_fn=_collate,
            pin_memory=self._settings.dist.device.type == "cuda",
            generator=torch.Generator(),  # the training's own numbers stay as they are
            multiprocessing_context="fork" if count else None,
            prefetch_factor=max(1, self._settings.data.prefetch // count) if count else None,
            worker_init_fn=lambda worker: ignore_parents_signals(),
        )


def _collate(samples: list[tuple[Any, Any]]) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Returns images and labels of the good samples, or nothing, and the bad ones."""
    good = [sample for sample in samples if isinstance(sample[0], Tensor)]
    bad = [sample for sample in samples if isinstance(sample[0], str)]
    return default_collate(good) if good else [], bad
