"""How fast images reach the training, and what limits them.

    python scripts/loader_benchmark.py                                     on the sample data
    python scripts/loader_benchmark.py root=/datasets/imagenet workers=1,2,8,16 images=4096
    python scripts/loader_benchmark.py gpu_images_per_s=7000               how many cores would feed that rate

The last line is the result as JSON; output=FILE writes it there too. Keys: see LoaderBenchmarkSettings in
cl_train/comparison/loader_speed.py.
Exit codes: 0 done, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cl_train.config.schema import ConfigError, settings_from_arguments, stop_with


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


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        stop_with(error)
