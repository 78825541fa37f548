"""Both splits of a data set of images, as batches on the device."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from cl_train.data.bad_images import BadImages
from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.device import MixBatch, MixLabels, Normalise, to_device
from cl_train.data.images import WorkerTimes
from cl_train.data.loader import Loader, LoaderSettings


class ImageData:
    """See `cl_train.data.build.Data` for the public members."""

    def __init__(
        self,
        classes: tuple[str, ...],
        fingerprint: str,
        train: Loader,
        val: Loader,
        settings: LoaderSettings,
        *,
        notes: tuple[str, ...],
        bad_images: BadImages,
        mean: Sequence[float],
        std: Sequence[float],
        mix: MixLabels | None = None,
    ) -> None:
        self.classes, self.num_classes, self.fingerprint = classes, len(classes), fingerprint
        self.train_loader, self.val_loader, self.bad_images = train, val, bad_images
        self.notes = notes
        self.train_images, self.val_images = train.samples, val.samples
        self.batches_per_epoch, self.workers = len(train), settings.workers
        self._settings, self._mix, self._mean, self._std = settings, mix, mean, std

    @property
    def times(self) -> WorkerTimes:
        return self.train_loader.times

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        normalise = Normalise(self._mean, self._std, form)
        yield from to_device(self.train_loader.batches(epoch, first_batch), normalise, self._mix_of(epoch))

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        return to_device(self.val_loader.batches(), Normalise(self._mean, self._std, form))

    def close(self) -> None:
        self.train_loader.close()
        self.val_loader.close()

    def _mix_of(self, epoch: int) -> MixBatch | None:
        if self._mix is None:
            return None
        mix, rank, world_size = self._mix, self._settings.rank, self._settings.world_size
        return lambda images, targets, number: mix(images, targets, epoch, number * world_size + rank)
