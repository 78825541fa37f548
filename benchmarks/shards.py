"""Images per second from tar shards and from the folder they were made from, interleaved.

    python benchmarks/shards.py FOLDER SHARDS [workers]      SHARDS: out of `cl-train prepare_imagenet shards`

Prints JSON: the ratio of the medians over interleaved epochs, decoding and cropping included, without a model.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.batch import DeviceFormat
from cl_train.data.build import build_data
from cl_train.system.distributed import Dist

EPOCHS = 8  # of each; the first is left out
CPU = torch.device("cpu")


def main(folder: str, shards: str, workers: str = "2") -> dict[str, float]:
    torch.set_num_threads(1)
    form = DeviceFormat(CPU, torch.float32, torch.channels_last)
    data = {
        name: build_data(
            DataConfig(name=name, root=root, workers=int(workers)),
            AugmentConfig(),
            batch_size=64,
            seed=0,
            dist=Dist(0, 0, 1, CPU),
        )
        for name, root in (("folder", folder), ("shards", shards))
    }
    rates: dict[str, list[float]] = {name: [] for name in data}
    for epoch in range(EPOCHS):
        for name in sorted(data, reverse=epoch % 2 == 1):
            start = time.perf_counter()
            images = sum(len(batch.targets) for batch in data[name].train(epoch, form))
            rates[name].append(images / (time.perf_counter() - start))
    for one in data.values():
        one.close()
    medians = {f"{name}_images_per_s": round(statistics.median(found[1:]), 1) for name, found in rates.items()}
    return medians | {"shards_over_folder": round(medians["shards_images_per_s"] / medians["folder_images_per_s"], 3)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), indent=1))
