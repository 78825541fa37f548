"""An IterableDataset of the user, through a plain `torch.utils.data.DataLoader`. It controls its
order, and a resumed epoch begins anew.
"""

import itertools
import logging
import multiprocessing
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from cl_train.data.device import RawBatch
from cl_train.data.loader import DataSettings
from cl_train.data.loader_report import BadImages, WorkerTimes
from cl_train.data.transforms import seeded_everywhere
from cl_train.data.user_dataset import SampleForm, check_first, reason_of
from cl_train.data.workers import ignore_parents_signals
from cl_train.errors import ConfigError, WorkerError

log = logging.getLogger(__name__)


class _Batches(IterableDataset[Any]):
    """Yields ([images, labels], bad samples with their reasons); the last batch may be smaller."""

    epoch = 0

    def __init__(self, dataset: Any, form: SampleForm, settings: DataSettings) -> None:
        self.dataset, self.form, self.settings = dataset, form, settings

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[tuple[str, str]]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        form, dist, stream = self.form, self.settings.dist, iter(self.dataset)
        good = list[Any]()
        for number in itertools.count():
            index = (number * workers + worker) * dist.world_size + dist.rank
            pixels = torch.empty(form.size, form.size, 3, dtype=form.dtype)
            try:
                with seeded_everywhere(form.transform.seed, self.epoch, index):
                    sample = next(stream)
                label = form.write(pixels.permute(2, 0, 1), sample, self.epoch, index)
                good.append((pixels, label))
            except StopIteration:
                break
            except Exception as error:
                # At once: a stream that only raises fills no batch.
                yield [], [(f"{form.name(number)} in worker {worker}", reason_of(error))]
            if len(good) == self.settings.batch_size:
                yield default_collate(good), []
                good = []
        if good:
            yield default_collate(good), []


class StreamLoader:
    """Has the public members of `HostLoader`; `samples`: of all ranks and workers together."""

    def __init__(
        self, dataset: Any, form: SampleForm, settings: DataSettings, bad_images: BadImages
    ) -> None:
        check_first(form, lambda: next(iter(dataset)), settings.data.worker_timeout_s)
        self.samples, self.label_shape = len(dataset), form.label_shape
        self.workers = settings.workers
        self.times = np.zeros((1, len(WorkerTimes._fields)))  # not measured
        self._settings, self._bad_images = settings, bad_images
        self._is_training = form.transform.training
        self._source = _Batches(dataset, form, settings)
        self._has_ended_early = False
        if self._is_training and settings.augment.repeats > 1:
            raise ConfigError(
                "augment.repeats does not work with an IterableDataset: it controls its own order"
            )
        if self._is_training and settings.dist.is_main:
            log.warning("an IterableDataset controls its order: resume is not exact")

    def batch_count(self) -> int:
        return self._settings.batch_count(self.samples, training=self._is_training)

    def start(self) -> None:
        """Nothing to do: the workers begin and end with their epoch."""

    close = start

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields the samples; in training full batches, `batch_count()` in an epoch, of a stream
        that begins again when it ends early. Raises as `HostLoader`.
        """
        if not self._is_training:
            seen = 0
            for number, (images, targets) in enumerate(self._good(epoch)):
                yield RawBatch(images, targets, number, epoch)
                seen += len(targets)
                if seen > self.samples:  # perhaps endless; the evaluation counts the samples
                    return
            return
        number = first_batch
        while number < self.batch_count():
            before = number
            for images, targets in itertools.islice(self._good(epoch), self.batch_count() - before):
                yield RawBatch(images, targets, number, epoch)
                number += 1
            if number == before:
                reasons = "; ".join(self._bad_images.reasons.values())
                raise WorkerError(
                    f"data.dataset: the workers get fewer than {self._settings.batch_size} good"
                    f" training samples, a batch. {reasons}"
                )
            if number < self.batch_count() and not self._has_ended_early:
                self._has_ended_early = True
                log.warning(
                    "data.dataset ended after %d of %d batches and begins again: some samples are"
                    " seen twice in the epoch",
                    number,
                    self.batch_count(),
                )

    def _good(self, epoch: int) -> Iterator[list[Tensor]]:
        """Yields the images and labels that the workers load; in training their last, smaller
        batches are joined to full ones. Raises BadImageError.
        """
        full = self._settings.batch_size
        joined: list[Tensor] = []
        for batch, bad in self._loaded(epoch):
            for name, reason in bad:
                self._bad_images.add(name, reason, skipped=True)
            if not batch:
                continue
            if self._is_training and len(batch[1]) < full:
                pairs = zip(joined or [part[:0] for part in batch], batch, strict=True)
                joined = [torch.cat(pair) for pair in pairs]
                if len(joined[1]) < full:
                    continue
                batch = [part[:full] for part in joined]
                joined = [part[full:] for part in joined]
            yield [batch[0].permute(0, 3, 1, 2), batch[1]]

    def _loaded(self, epoch: int) -> Iterator[tuple[list[Tensor], list[tuple[str, str]]]]:
        self._source.epoch = epoch
        if hasattr(self._source.dataset, "set_epoch"):
            self._source.dataset.set_epoch(epoch)
        options: dict[str, Any] = {
            "num_workers": self.workers,
            "pin_memory": self._settings.dist.device.type == "cuda",
            "generator": torch.Generator(),  # the training's own numbers stay as they are
        }
        if self.workers:
            options["multiprocessing_context"] = "fork"
            options["timeout"] = self._settings.data.worker_timeout_s
            options["prefetch_factor"] = max(1, self._settings.data.prefetch // self.workers)
            options["worker_init_fn"] = lambda worker: ignore_parents_signals()
        before = multiprocessing.active_children()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than cores, and of their fork
            loaded = iter(DataLoader(self._source, batch_size=None, **options))
        workers = [child for child in multiprocessing.active_children() if child not in before]
        problem = ""
        try:
            yield from loaded
        except RuntimeError as error:  # a worker died or hangs
            problem = " ".join(str(error).split())
        del loaded  # torch ends its workers
        for worker in workers:
            worker.kill()  # one that hangs: it ignores SIGTERM, and the program would wait for it
        if problem:
            raise WorkerError(f"data.dataset: {problem}")
