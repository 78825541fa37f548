"""How a training run scales to more GPUs: all-reduce, loader cores, storage, evaluation and checkpoints, by arithmetic.

    cl-train plan model=resnet50 images_per_s=2800 gpus=8,256
    cl-train plan model=resnet50 images_per_s=2800 gpus=8,16,32 network_gb_per_s=10 cores_per_gpu=8

images_per_s is the speed of one GPU: see cl-train benchmark. loader_images_per_s: see cl-train loader_benchmark.
docs/clusters.md explains the terms and how well they agree with measurements.
Exit codes: 0 done, 2 wrong usage.
"""

import json
from dataclasses import asdict

from cl_train.config.benchmarks import PlanSettings
from cl_train.config.validation import settings_from_arguments

USAGE = "images_per_s=... [key=value ...]"
SETTINGS = {"settings": PlanSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(PlanSettings, words)
    import torch

    from cl_train.comparison.scaling import plan, table
    from cl_train.models.sources import build_model

    with torch.device("meta"):
        model = build_model(settings.model, num_classes=settings.classes)
    plans = [plan(model, gpus, settings) for gpus in settings.gpus]
    print(json.dumps([asdict(item) for item in plans]) if settings.json else table(plans))
    return 0
