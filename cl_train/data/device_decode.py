"""data.decode=gpu: JPEGs are decoded on the device by torchcodec (nvJPEG), with the augmentation of the CPU path.

Threads read the files; a whole batch is decoded in one call; crop, antialiased resize and flip follow on the device,
from the same random numbers. What nvJPEG refuses is decoded on the CPU. Validation stays on the CPU path.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from cl_train.config.schema import ConfigError
from cl_train.data import crops
from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.decode import BadImage, Encoded, read_file
from cl_train.data.device import Normalise
from cl_train.data.loader import BadImageError, FolderData
from cl_train.data.order import Indices, permutation, rank_share, sample_generator

Decoder = Callable[[list[bytes], torch.device], list[Tensor]]  # -> uint8 [3, H, W] each, on the device


def torchcodec_decoder() -> Decoder:
    """Raises ConfigError where torchcodec is missing or cannot decode images."""
    try:
        decode_jpeg = importlib.import_module("torchcodec.decoders").decode_jpeg
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            "data.decode=gpu needs torchcodec with image decoding; pip install torchcodec, or use data.decode=cpu"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from None

    def decode(files: list[bytes], device: torch.device) -> list[Tensor]:
        tensors: list[Tensor] = decode_jpeg(files, mode="RGB", device=device)
        return tensors

    return decode


class DeviceDecodedData(FolderData):
    """As FolderData, with the training images decoded on the device."""

    decoder: Decoder

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        """This rank's share of global batch `first_batch`, `first_batch + 1`, ... of `epoch`."""
        s = self._settings
        order = permutation(self._seed, epoch, self.train_images)
        normalise, mix = Normalise(s.mean, s.std, form), self._mix_of(epoch)
        numbers = iter(range(first_batch, self.batches_per_epoch))
        with ThreadPoolExecutor(max(1, s.workers)) as readers:

            def read(number: int) -> tuple[int, Indices, list[Future[bytes]]]:
                share = rank_share(order, number, s.batch_size, s.rank, s.world_size)
                return number, share, [readers.submit(self._read, int(index)) for index in share]

            ahead = [read(number) for number in islice(numbers, s.prefetch)]
            while ahead:
                number, share, files = ahead.pop(0)
                ahead += [read(following) for following in islice(numbers, 1)]
                images = self._images([file.result() for file in files], share, epoch, form.device)
                targets = torch.from_numpy(self._folder.train.labels[share]).to(form.device)
                batch = normalise(images)
                yield Batch(*(mix(batch, targets, number) if mix else (batch, targets)))

    def _read(self, index: int) -> bytes:
        path = self._folder.train.path(index)
        try:
            return read_file(path)
        except BadImage as bad:
            raise BadImageError(f"'{os.fsdecode(path)}' cannot be read: {bad}") from None

    def _images(self, files: list[bytes], share: Indices, epoch: int, device: torch.device) -> Tensor:
        """uint8 [N, 3, size, size], channels_last, on the device."""
        form = self._form
        batch = torch.empty(
            (len(files), 3, form.size, form.size),
            dtype=torch.uint8,
            device=device,
            memory_format=torch.channels_last,
        )
        for row, index, image in zip(batch, share.tolist(), self._decoded(files, share, device), strict=True):
            uniform = sample_generator(form.seed, epoch, index).random(crops.RANDOM_NUMBERS).tolist()
            box = crops.random_resized_crop(image.shape[1], image.shape[2], form.crop, uniform[1:])
            crop = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
            # In float: CUDA has no antialiased resize of uint8. Rounded as the CPU's.
            pixels = torch.nn.functional.interpolate(
                crop.float(), size=(form.size, form.size), mode="bilinear", antialias=True
            )
            pixels = pixels[0].round_().clamp_(0, 255)
            row.copy_(pixels.flip(2) if uniform[0] < form.flip else pixels)
        return batch

    def _decoded(self, files: list[bytes], share: Indices, device: torch.device) -> list[Tensor]:
        simple = [number for number, data in enumerate(files) if _is_simple(data)]
        decoded: dict[int, Tensor] = {}
        try:
            on_device = self.decoder([files[number] for number in simple], device) if simple else []
            decoded = dict(zip(simple, on_device, strict=True))
        except RuntimeError:  # one file spoils its batch: all go to the CPU, which names the bad one
            decoded = {}
        for number, data in enumerate(files):
            if number not in decoded:
                decoded[number] = self._on_cpu(data, int(share[number])).to(device)
        return [decoded[number] for number in range(len(files))]

    def _on_cpu(self, data: bytes, index: int) -> Tensor:
        try:
            return torch.from_numpy(Encoded(data).decode()).permute(2, 0, 1)
        except BadImage as bad:
            path = os.fsdecode(self._folder.train.path(index))
            raise BadImageError(f"'{path}' cannot be decoded: {bad}. Repair or remove it") from None


def _is_simple(data: bytes) -> bool:
    try:
        return Encoded(data).simple
    except BadImage:
        return False
