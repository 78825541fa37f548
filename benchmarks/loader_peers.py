"""cl_train's loader against others on the same files: torchvision's reference, timm, decoding alone.

    python -m benchmarks.loader_peers data.root=/datasets/imagenet data.workers=8 out=results/loader-peers.json

timm is left out if it is not installed.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

from cl_train.cli import exit_code
from cl_train.commands.json_result import print_result
from cl_train.comparison import loader_speed
from cl_train.comparison.loader_speed import Pipeline, deliver
from cl_train.config.benchmarks import LoaderBenchmarkSettings
from cl_train.data.folder import read_folder

_DECODED_FILES = 256


def main(words: list[str]) -> int:
    print_result(LoaderBenchmarkSettings, [*words, "json=true"], measure)
    return 0


def measure(settings: LoaderBenchmarkSettings) -> tuple[dict[str, Any], str]:
    settings = loader_speed.with_defaults(settings)
    workers = settings.workers[-1]
    own = [loader_speed.ours(settings, workers, decoder) for decoder in ("simplejpeg", "pillow")]
    pipelines = [loader_speed.torchvision_reference(settings, workers), *own, decoding_only(settings)]
    missing: dict[str, str] = {}
    try:
        pipelines.append(timm(settings, workers))
    except Exception as error:  # also a broken installation
        missing["timm"] = f"does not start: {(str(error) or type(error).__name__).splitlines()[0]}"
    result = loader_speed.measure(pipelines, settings) | {"missing": missing}
    return result, loader_speed.table(result)


def decoding_only(settings: LoaderBenchmarkSettings) -> Pipeline:
    """libjpeg-turbo on whole files in memory, one core: the upper limit for a loader that decodes whole images."""
    split = read_folder(Path(str(settings.root))).train
    sources = [split.read(index) for index in range(0, len(split), max(1, len(split) // _DECODED_FILES))]

    def run() -> int:
        for data in sources:
            simplejpeg.decode_jpeg(data, "RGB", strict=False)
        return len(sources)

    return Pipeline("decoding only", 1, run)


def timm(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """timm's training loader: uint8 batches from its fast_collate, the input of its GPU prefetcher."""
    data, collate = importlib.import_module("timm.data"), importlib.import_module("timm.data.loader").fast_collate
    loader = data.create_loader(
        data.create_dataset("", f"{settings.root}/train", is_training=True),
        (3, settings.image_size, settings.image_size),
        settings.batch_size,
        is_training=True,
        use_prefetcher=False,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=True,
        color_jitter=0.0,
        device=torch.device("cpu"),
    )
    loader.dataset.transform.transforms[-2:] = [_as_uint8]  # instead of ToTensor and Normalize
    return Pipeline("timm", workers, lambda: deliver(loader, settings.images))


def _as_uint8(image: Any) -> np.ndarray[Any, Any]:
    """uint8 [3, H, W], as in timm's transform for its prefetcher."""
    return np.rollaxis(np.array(image, dtype=np.uint8), 2)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
