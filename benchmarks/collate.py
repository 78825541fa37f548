"""channels_last_collate against copying the same bytes, and against default_collate with `.to(channels_last)`.

    python -m benchmarks.collate [batch_size] [image_size]

Prints JSON: medians over alternating calls and their ratios, on one thread. `block_copy` is one copy of the whole
batch, `image_copies` copies image by image; both write to new memory, as a collate function must.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from cl_train.comparison.alternation import alternate
from cl_train.data.collate import channels_last_collate
from cl_train.system.machine import timed_s


def measure(batch_size: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    batch = np.random.default_rng(0).integers(0, 256, (batch_size, size, size, 3), np.uint8)
    arrays = [image.copy() for image in batch]
    planar = [(torch.from_numpy(array.transpose(2, 0, 1).copy()), label) for label, array in enumerate(arrays)]
    interleaved = [(torch.from_numpy(array).permute(2, 0, 1), label) for label, array in enumerate(arrays)]
    functions: dict[str, Callable[[], Any]] = {
        "block_copy": batch.copy,
        "image_copies": lambda: np.stack(arrays),
        "ours_array": lambda: channels_last_collate(list(zip(arrays, range(batch_size), strict=True))),
        "ours_interleaved": lambda: channels_last_collate(interleaved),
        "ours_planar": lambda: channels_last_collate(planar),
        "default_interleaved": lambda: default_collate(interleaved)[0].to(memory_format=torch.channels_last),
        "default_planar": lambda: default_collate(planar)[0].to(memory_format=torch.channels_last),
    }
    blocks = [partial(timed_s, function, torch.device("cpu")) for function in functions.values()]
    found = alternate(blocks, time_limit_s=20.0, min_rounds=20)
    ms = {name: round(1000 * found.median_s(number), 3) for number, name in enumerate(functions)}
    of_block_copy = {name: round(ms["block_copy"] / ms[name], 2) for name in functions if name.startswith("ours")}
    of_default = {kind: round(ms[f"default_{kind}"] / ms[f"ours_{kind}"], 2) for kind in ("interleaved", "planar")}
    return {"ms": ms, "of_block_copy": of_block_copy, "times_default_collate": of_default}


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    print(json.dumps(measure(*(words + [64, 224][len(words) :])), indent=1))
