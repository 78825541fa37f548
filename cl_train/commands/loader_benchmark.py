"""How fast images reach the training, and what limits them.

    cl-train loader_benchmark                                     on the sample data
    cl-train loader_benchmark data.root=/datasets/imagenet data.workers=1,2,8,16 images=4096
    cl-train loader_benchmark gpu_images_per_s=7000               how many cores would feed that rate

Exit codes: 0 done, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from cl_train.config.benchmarks import LoaderBenchmarkSettings
from cl_train.config.validation import settings_from_arguments
from cl_train.system.files import write_json

USAGE = "[key=value ...]"
SETTINGS = {"settings": LoaderBenchmarkSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(LoaderBenchmarkSettings, words)
    from cl_train.comparison.loader_speed import benchmark, table

    with redirect_stdout(sys.stderr if settings.json else sys.stdout):
        result = benchmark(settings)
        if settings.out:
            Path(settings.out).parent.mkdir(parents=True, exist_ok=True)
            write_json(Path(settings.out), result)
            print(f"written: {settings.out}")
        print(table(result))
    if settings.json:
        print(json.dumps(result))
    return 0
