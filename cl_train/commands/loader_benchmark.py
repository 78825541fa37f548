"""How fast images reach the training, and what limits them.

    cl-train loader_benchmark                                     on the sample data
    cl-train loader_benchmark data.root=/datasets/imagenet data.workers=1,2,8,16 images=4096

Exit codes: 0 done, 2 wrong usage.
"""

from cl_train.commands import Result, print_result
from cl_train.config.schema import LoaderBenchmarkSettings

SETTINGS = {"settings": LoaderBenchmarkSettings}


def main(words: list[str]) -> int:
    def measure(settings: LoaderBenchmarkSettings) -> Result:
        from cl_train.measure.loaders import benchmark_loaders

        return benchmark_loaders(settings)

    print_result(LoaderBenchmarkSettings, words, measure)
    return 0
