"""How fast images reach the training, and what limits them.

    cl-train loader_benchmark                                     on the sample data
    cl-train loader_benchmark root=/datasets/imagenet workers=1,2,8,16 images=4096
    cl-train loader_benchmark gpu_images_per_s=7000               how many cores would feed that rate

The last line is the result as JSON; output=FILE writes it there too. Keys: see LoaderBenchmarkSettings in
cl_train/comparison/loader_speed.py.
Exit codes: 0 done, 2 wrong usage.
"""

from __future__ import annotations

import json
from pathlib import Path

from cl_train.config.validation import settings_from_arguments


def main(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    from cl_train.comparison.loader_speed import LoaderBenchmarkSettings, benchmark, table

    settings = settings_from_arguments(LoaderBenchmarkSettings, words)
    result = benchmark(settings)
    print(table(result))
    if settings.output:
        Path(settings.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0
