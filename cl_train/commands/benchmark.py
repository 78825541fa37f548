"""Both layouts of one or many models, in one process, in alternating blocks: parity, speed and
memory.

    cl-train benchmark                                    resnet50, this machine's best precision
    cl-train benchmark model=resnet50,mobilenet_v2 mode=train,infer batch_size=64 precision=fp16
    cl-train benchmark model=resnet18,resnet50 precision=fp32,bf16 time_limit_s=300
    cl-train benchmark compile=false,true out=results/train-fp16.json
    cl-train benchmark model=r3d_18 frames=16 batch_size=4
    cl-train benchmark config=outputs/RUN                 of a run: its model, sizes and precision
    cl-train benchmark model=net:old,net:new compare_by=model    two models in turns, channels_last

Blocks alternate A B B A with the same weights and images until the 95 % interval of the ratio is at
most target_ci wide or time_limit_s is over. The step is that of training, loss scaling included.
Each combination ends with four lines: is it right, is it faster, because of what, what to do;
several of a model end with the fastest. `out` is written after each combination: stopped before
the end it says "complete": false.
Exit codes: 0 done, 1 a combination failed, 2 wrong usage, 130/143 stopped by a signal.
"""

from typing import Any

from cl_train.commands import Result, print_result
from cl_train.config.schema import BenchmarkSettings
from cl_train.config.validation import show

SETTINGS = {"settings": BenchmarkSettings}


def main(words: list[str]) -> int:
    document = print_result(BenchmarkSettings, words, measure)
    return 1 if any("error" in result for result in document["results"]) else 0


def measure(settings: BenchmarkSettings) -> Result:
    """Returns the result, and of several combinations the verdicts and the fastest."""
    from cl_train.measure.suite import NAMES, run_suite

    document = run_suite(settings)
    results = document["results"]
    if len(results) == 1:
        return document, ""
    varied = [name for name in NAMES[1:] if len({result[name] for result in results}) > 1]

    def typed(result: dict[str, Any]) -> str:
        return " ".join([result["model"], *(f"{name}={show(result[name])}" for name in varied)])

    verdicts = []
    for result in results:
        words = [f"{pair['candidate']} {_verdict(pair)}" for pair in result["pairs"]]
        verdicts.append(f"{typed(result)}: {', '.join(words) or 'failed'}")
    undecided = {"inconclusive", "not_comparable"}
    outcomes = [{pair["verdict"] for pair in result["pairs"]} for result in results]
    decided = sum(bool(outcome) and outcome.isdisjoint(undecided) for outcome in outcomes)
    verdicts.append(f"{decided} of {len(results)} are decided")
    for one in document["fastest"]:
        speed = f"{one['layout']}, {one['images_per_s']:.1f} images/s"
        verdicts.append(f"fastest: {typed(one)} {speed}")
    return document, "; ".join(verdicts)


def _verdict(pair: dict[str, Any]) -> str:
    ratio = "" if pair["verdict"] == "not_comparable" else f" ({pair['ratio']:.2f}x)"
    return pair["verdict"].replace("_", " ") + ratio
