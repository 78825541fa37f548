"""channels_last_collate against copying the same bytes, and against default_collate with `.to(channels_last)`.

    python benchmarks/collate.py [batch_size] [image_size]

Prints JSON: ratios of medians over interleaved repeats, on one thread. `block_copy` is one copy of the whole batch,
`image_copies` copies image by image; both write to new memory, as a collate function must.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from cl_train.data.collate import channels_last_collate

REPEATS = 41


def medians_ms(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(values[1:]) for name, values in seconds.items()}


def measure(batch_size: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    batch = np.random.default_rng(0).integers(0, 256, (batch_size, size, size, 3), np.uint8)
    arrays = [image.copy() for image in batch]
    samples = {
        "array": [(array, label) for label, array in enumerate(arrays)],
        "interleaved": [(torch.from_numpy(array).permute(2, 0, 1), label) for label, array in enumerate(arrays)],
        "planar": [(torch.from_numpy(array.transpose(2, 0, 1).copy()), label) for label, array in enumerate(arrays)],
    }

    def copy_images() -> None:
        new = np.empty_like(batch)
        for row, array in zip(new, arrays, strict=True):
            row[...] = array

    def default(kind: str) -> Any:
        images, labels = default_collate(samples[kind])
        return images.to(memory_format=torch.channels_last), labels

    functions: dict[str, Callable[[], Any]] = {
        "block_copy": lambda: np.copyto(np.empty_like(batch), batch),
        "image_copies": copy_images,
        **{f"ours_{kind}": partial(channels_last_collate, samples[kind]) for kind in samples},
        **{f"default_{kind}": partial(default, kind) for kind in ("interleaved", "planar")},
    }
    ms = medians_ms(functions)
    return {
        "batch_size": batch_size,
        "image_size": size,
        "ms": {name: round(value, 3) for name, value in ms.items()},
        "of_block_copy": {kind: round(ms["block_copy"] / ms[f"ours_{kind}"], 2) for kind in samples},
        "of_image_copies": {kind: round(ms["image_copies"] / ms[f"ours_{kind}"], 2) for kind in samples},
        "times_default_collate": {
            kind: round(ms[f"default_{kind}"] / ms[f"ours_{kind}"], 2) for kind in ("interleaved", "planar")
        },
    }


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    print(json.dumps(measure(*(words + [64, 224][len(words) :])), indent=1))
