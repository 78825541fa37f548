"""Compare runs that are there already, and say which layout is faster, or why that cannot be said.

    cl-train compare multirun/2026-11-20_12-00-00      the report of a sweep, again
    cl-train compare outputs/A outputs/B               two runs
    cl-train compare A1 B1 B2 A2                       repeats, paired in the order in which they ran
    cl-train compare multirun/SWEEP --by precision     the same runs by another key
    cl-train compare --parity resnet50                 do both layouts of a model compute the same?

Writes comparison.md, .csv, .json and .png into --output: the sweep's folder, or the last run's. With folders and
--parity MODEL, the pairs of a model that fails are not comparable.
Exit codes: 0 done, 1 the layouts compute different things, 2 wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cl_train.comparison.report import as_markdown, compare_folders
from cl_train.config.schema import PRECISIONS, Config, ConfigError
from cl_train.config.validation import setting_fields, suggest


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="a sweep's folder, or run folders")
    parser.add_argument("--by", default=None, metavar="KEY", help="the setting to compare by (default: channels_last)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the report goes")
    parser.add_argument("--parity", metavar="MODEL", help="check that both layouts of this model compute the same")
    parser.add_argument("--precision", default="fp32", metavar="NAME", help="of --parity (default: fp32)")
    parser.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="of --parity (default: 96, or the model's own)"
    )
    options = parser.parse_args(words)
    if not options.folders and not options.parity:
        raise ConfigError("nothing to compare: name a sweep's folder, two run folders, or --parity MODEL")
    check_words(options.by, options.precision)
    failures = parity_failures(options.parity, options.precision, options.image_size) if options.parity else {}
    if options.folders:
        report = compare_folders(options.folders, options.by, out=options.output, parity_failures=failures)
        print(as_markdown(report))
    return 1 if failures else 0


def check_words(by: str | None, precision: str) -> None:
    """Refuse a key or a precision that train.py does not know."""
    keys = list(setting_fields(Config))
    problems = []
    if by is not None and by not in keys:
        problems.append(f"--by {by}: not a setting{suggest(by, keys)}")
    if precision not in PRECISIONS:
        problems.append(f"--precision {precision}: must be one of {', '.join(PRECISIONS)}")
    if problems:
        raise ConfigError(problems)


def parity_failures(model_name: str, precision_name: str, image_size: int | None) -> dict[str, str]:
    """What the report says of a model whose layouts differ; empty where they agree. Prints the outcome."""
    import torch

    from cl_train.comparison.parity import check_parity
    from cl_train.models.registry import build_model, usual_image_size
    from cl_train.system.distributed import choose_device

    torch.manual_seed(0)
    size = image_size or usual_image_size(model_name)
    model = build_model(model_name, num_classes=100, image_size=size)
    outcome = check_parity(model, image_size=size, precision=precision_name, device=choose_device("auto"))
    print(f"{model_name}: {outcome}")
    return {} if outcome.passed else {model_name: str(outcome)}
