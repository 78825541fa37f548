"""An IterableDataset of the user, through a plain `torch.utils.data.DataLoader`.

A stream controls its order: it depends on the number of workers, and a resumed epoch begins anew.
"""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from cl_train.config.schema import DataConfig
from cl_train.data.device import RawBatch
from cl_train.data.loader import worker_count
from cl_train.data.loader_report import BadImages, WorkerTimes
from cl_train.data.transforms import seeded_everywhere
from cl_train.data.user_dataset import SampleForm, check_first, reason_of
from cl_train.data.workers import ignore_parents_signals
from cl_train.errors import WorkerError
from cl_train.system.distributed import Dist


class _Samples(IterableDataset[Any]):
    """Yields (pixels [size, size, 3], label) of each sample, or (name, reason) of a bad one.

    In training the next good sample, or at the end the last one, also takes the place of a bad one.
    """

    def __init__(self, dataset: Any, form: SampleForm, dist: Dist) -> None:
        self.dataset, self.form, self.dist, self.epoch = dataset, form, dist, 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        form, stream = self.form, iter(self.dataset)
        good: list[tuple[Any, Any]] = []  # the last good sample
        missing = 0
        for number in itertools.count():
            index = (number * workers + worker) * self.dist.world_size + self.dist.rank
            pixels = torch.empty(form.size, form.size, 3, dtype=form.dtype)
            try:
                with seeded_everywhere(form.transform.seed, self.epoch, index):
                    sample = next(stream)
                label = form.write(pixels.permute(2, 0, 1), sample, self.epoch, index)
            except StopIteration:
                break
            except (Exception, SystemExit) as error:
                yield f"{form.name(number)} in worker {worker}", reason_of(error)
                missing += form.transform.training
            else:
                good = [(pixels, label)]
                yield from good * (1 + missing)
                missing = 0
        yield from good * missing


def _collate(samples: list[Any]) -> tuple[list[Tensor], list[tuple[str, str]]]:
    bad = [sample for sample in samples if isinstance(sample[0], str)]
    good = [sample for sample in samples if isinstance(sample[0], Tensor)]
    return default_collate(good) if good else [], bad


class StreamLoader:
    """Has the public members of `HostLoader`; `samples`: of all ranks and workers together."""

    def __init__(
        self,
        dataset: Any,
        form: SampleForm,
        batch_size: int,
        cfg: DataConfig,
        dist: Dist,
        bad_images: BadImages,
    ) -> None:
        check_first(form, lambda: next(iter(dataset)), cfg.worker_timeout_s)
        self.samples, self.label_shape = len(dataset), form.label_shape
        self.workers = worker_count(cfg, dist)
        self.times = np.zeros((1, len(WorkerTimes._fields)))  # not measured
        self._batch_size, self._dist, self._bad_images = batch_size, dist, bad_images
        self._is_training = form.transform.training
        self._source = _Samples(dataset, form, dist)
        options: dict[str, Any] = {
            "multiprocessing_context": "fork",
            "timeout": cfg.worker_timeout_s,
            "prefetch_factor": max(1, cfg.prefetch // max(1, self.workers)),
            "worker_init_fn": lambda worker: ignore_parents_signals(),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more workers than cores
            self._loader = DataLoader(
                self._source,
                batch_size,
                num_workers=self.workers,
                collate_fn=_collate,
                pin_memory=dist.device.type == "cuda",
                generator=torch.Generator(),  # the training's own numbers stay as they are
                **options if self.workers else {},
            )

    def batch_count(self) -> int:
        rank, ranks = self._dist.rank, self._dist.world_size
        if self._is_training:
            return self.samples // (self._batch_size * ranks)
        return -(-len(range(rank, self.samples, ranks)) // self._batch_size)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields full batches in training, otherwise all samples; raises as `HostLoader`."""
        count, size, number = self.batch_count(), self._batch_size, first_batch
        batches: Iterator[list[Tensor]] = self._joined(epoch)
        if self._is_training:
            batches = itertools.islice(batches, count - first_batch)
        for images, targets in batches:
            if self._is_training and len(targets) < size:
                break
            if number * size + len(targets) > self.samples:
                raise WorkerError(
                    f"data.dataset: the val dataset yields more than the {self.samples} samples of"
                    " its length. It must end, and divide its samples among ranks and workers"
                    " (torch.utils.data.get_worker_info)"
                )
            yield RawBatch(images.permute(0, 3, 1, 2), targets, number, epoch)
            number += 1
        if self._is_training and number < count:
            last = [f"; {name}: {reason}" for name, reason in self._bad_images.reasons.items()][-1:]
            raise WorkerError(
                f"data.dataset ended after {number} of {count} batches of {size} samples on rank"
                f" {self._dist.rank}: its length is {self.samples}, of all ranks and workers"
                f" together{''.join(last)}"
            )

    def close(self) -> None:
        """Nothing to do: the workers end with their epoch."""

    def _joined(self, epoch: int) -> Iterator[list[Tensor]]:
        """Yields batches of the full size, joined of those of the workers, then the rest."""
        size, joined = self._batch_size, list[Tensor]()
        for loaded, bad in self._loaded(epoch):
            for name, reason in bad:
                self._bad_images.add(name, reason, skipped=True)
            if joined and loaded:
                loaded = [torch.cat(parts) for parts in zip(joined, loaded, strict=True)]
            joined = loaded or joined
            while joined and len(joined[1]) >= size:
                yield [part[:size] for part in joined]
                joined = [part[size:] for part in joined]
        if joined and len(joined[1]):
            yield joined

    def _loaded(self, epoch: int) -> Iterator[tuple[list[Tensor], list[tuple[str, str]]]]:
        self._source.epoch = epoch
        if hasattr(self._source.dataset, "set_epoch"):
            self._source.dataset.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a fork of a threaded process
            batches = iter(self._loader)
        try:
            yield from batches
        except RuntimeError as error:  # a worker died or hangs
            if isinstance(batches, _MultiProcessingDataLoaderIter):
                batches._shutdown_workers()
                for worker in batches._workers:
                    worker.kill()  # it ignores SIGTERM, and the program would wait for it
            raise WorkerError(f"data.dataset: {' '.join(str(error).split())}") from error
