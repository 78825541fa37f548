"""Both layouts of one or many models, in one process, in alternating blocks: parity, speed and memory.

    cl-train benchmark                                               resnet50, this machine's best precision
    cl-train benchmark model=resnet50,mobilenet_v2 mode=train,infer batch_size=64 precision=fp16
    cl-train benchmark compile=false,true out=results/train-fp16.json

Blocks alternate A B B A with the same weights and images until the 95 % interval of the ratio is at most target_ci wide
or time_limit_s is over. The step is that of training, loss scaling included.
Exit codes: 0 done, 1 a combination failed, 2 wrong usage.
"""

from typing import Any

from cl_train.commands import print_result
from cl_train.config.schema import BenchmarkSettings

SETTINGS = {"settings": BenchmarkSettings}


def main(words: list[str]) -> int:
    document = print_result(BenchmarkSettings, words, measure)
    return 1 if any("error" in result for result in document["results"]) else 0


def measure(settings: BenchmarkSettings) -> tuple[dict[str, Any], str]:
    """The result, and one line: the verdict on each layout of each combination."""
    from cl_train.comparison.suite import run_suite

    document = run_suite(settings)
    verdicts = []
    for result in document["results"]:
        words = []
        for pair in result["pairs"]:
            ratio = "" if pair["verdict"] == "not_comparable" else f" ({pair['ratio']:.2f}x)"
            words.append(f"{pair['candidate']} {pair['verdict'].replace('_', ' ')}{ratio}")
        verdicts.append(f"{result['model']}: {', '.join(words) or 'failed'}")
    return document, "; ".join(verdicts)
