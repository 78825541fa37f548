"""Loads an IterableDataset of the user, which controls its order: a resumed epoch begins anew."""

import itertools
import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from cl_train.data.bad_images import BadImages
from cl_train.data.device import RawBatch
from cl_train.data.loader import DataSettings
from cl_train.data.transforms import WorkerTimes, seeded_everywhere
from cl_train.data.user_dataset import SampleForm
from cl_train.data.workers import Workers, begin_sample
from cl_train.errors import ConfigError, WorkerError
from cl_train.system.failures import explain_failure

log = logging.getLogger(__name__)


class StreamLoader(IterableDataset[Any]):
    """Stands in for `HostLoader`. `sample_count` is that of all ranks and workers together.

    Each worker collects its own batches from the stream, in training only full ones.
    """

    times = WorkerTimes()  # not measured

    def __init__(
        self, dataset: Any, form: SampleForm, settings: DataSettings, bad_images: BadImages
    ) -> None:
        self.sample_count, self.workers = len(dataset), settings.workers
        self._dataset, self._form = dataset, form
        self._settings, self._bad_images = settings, bad_images
        self._is_training = form.transform.training
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

    close = start

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yields (images [N, size, size, 3], labels), or (name, reason) of a bad sample."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        form, dist = self._form, self._settings.dist
        stream = itertools.chain.from_iterable([self._dataset])  # so that `next` calls `iter`
        shape = self._settings.batch_size, form.size, form.size, 3
        images, labels = torch.empty(shape, dtype=form.dtype), list[int]()
        for number in itertools.count():
            begin_sample(number)
            index = (number * workers + worker) * dist.world_size + dist.rank
            try:
                with seeded_everywhere(form.transform.seed, self._epoch, index):
                    sample = next(stream)
                row = images[len(labels)].permute(2, 0, 1)
                labels.append(form.write(row, sample, self._epoch, index))
            except StopIteration:
                break
            except Exception as error:
                yield f"{form.name(number)} in worker {worker}", explain_failure(error)
            if len(labels) == len(images):
                yield images, torch.tensor(labels)
                images, labels = torch.empty_like(images), []
        if labels and not self._is_training:
            yield images[: len(labels)], torch.tensor(labels)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields the batches of `epoch`. In training there are `batch_count()` of them; a stream
        that ends earlier begins again.

        Raises BadImageError; WorkerError: a worker died or hangs, or the stream has no full batch.
        """
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        batch_size, number, seen = self._settings.batch_size, first_batch, 0
        wanted = self.sample_count + 1  # one too many, which the evaluation refuses
        if self._is_training:
            wanted = (self.batch_count() - first_batch) * batch_size
        while seen < wanted:
            seen_before = seen
            with closing(self._new_workers()) as workers:
                while seen < wanted and (item := workers.next()):
                    if isinstance(item[0], str):
                        self._bad_images.add(*item, skipped=True)
                        continue
                    yield RawBatch(item[0].permute(0, 3, 1, 2), item[1], number, epoch)
                    number, seen = number + 1, seen + len(item[1])
            if not self._is_training:
                return
            if seen == seen_before:
                reasons = "; ".join(self._bad_images.reasons.values())
                raise WorkerError(
                    f"data.dataset: each worker gets fewer than {batch_size} good training samples,"
                    f" a batch. {reasons}"
                )

    def _new_workers(self) -> Workers:
        data, options = self._settings.data, dict[str, Any](batch_size=None)
        if self.workers:
            options["prefetch_factor"] = max(1, data.prefetch // self.workers)
            options["pin_memory"] = self._settings.dist.device.type == "cuda"
        name_of = self._form.name
        return Workers(self, self.workers, name_of, data.worker_timeout_s, **options)
