"""Both memory formats of one or many models, in one process, in alternating blocks: speed, memory, and where time goes.

    cl-train benchmark                                               resnet50, this machine's best precision
    cl-train benchmark model=resnet50,mobilenet_v2 mode=train,infer batch_size=64 precision=fp16
    cl-train benchmark compile=false,true --output results/train-fp16.json
    cl-train benchmark --baseline results/train-fp16.json            did the gain of channels_last fall?

Blocks alternate A B B A with the same weights and images until the 95 % interval of the ratio is narrow enough
(target_ci) or the time is over (time_limit_s). The step is training's own, loss scaling included. Before that the
layouts are checked to compute the same. The last line is the result as JSON.
Settings: see BenchmarkSettings in cl_train/comparison/suite.py; --help lists them.
Exit codes: 0 done, 1 a combination failed or a gain fell below the baseline, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cl_train.config.validation import from_mapping, setting_fields, settings_from_arguments


def main(words: list[str]) -> int:
    from cl_train.comparison.suite import (
        BenchmarkSettings,
        check_gate,
        check_settings,
        read_baseline,
        run_suite,
    )

    listed = "\n".join(
        f"  {name:<14} {item.metadata['help']}" for name, item in setting_fields(BenchmarkSettings).items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsettings:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="compare the gains with an earlier --output file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, such as results/NAME.json")
    options = parser.parse_args(words)
    baseline = read_baseline(options.baseline) if options.baseline else None
    if baseline is not None and not options.settings:
        settings = from_mapping(BenchmarkSettings, baseline["settings"])
    else:
        settings = settings_from_arguments(BenchmarkSettings, options.settings)
    check_settings(settings)
    document = run_suite(settings)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.output}")
    fallen = check_gate(baseline, document) if baseline is not None else []
    for line in fallen:
        print(f"the gate is not passed: {line}")
    if baseline is not None and not fallen:
        print("the gate is passed: no gain fell by more than its interval")
    print(json.dumps(document))
    return 1 if fallen or any("error" in result for result in document["results"]) else 0
