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

from cl_train.comparison.pairs import Pair, compare_pair, compare_runs
from cl_train.comparison.report import Comparison, FailedJob, as_markdown, write_report
from cl_train.comparison.run_records import Run, read_run
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
        report(options.folders, options.by, options.output, failures)
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


def report(folders: list[Path], by: str | None, output: Path | None, failures: dict[str, str]) -> None:
    """Pair, judge, write and print."""
    if len(folders) == 1 and (folders[0] / "sweep.json").is_file():
        from cl_train.comparison.sweep import report as report_sweep

        report_sweep(folders[0], by, whole=True, output=output, parity_failures=failures)
        return
    by = by or "channels_last"
    if len(folders) == 1:
        runs, failed = runs_inside(folders[0])
    else:
        runs, failed = [read_run(folder) for folder in folders], []
    if len(runs) + len(failed) < 2:
        raise ConfigError(f"{folders[0]}: a comparison needs two runs or more, there is {len(runs)}")
    pairs = [compare_two(runs[0], runs[1], by, failures)] if len(runs) == 2 else compare_runs(runs, by, failures)
    comparison = Comparison(pairs, failed, [])
    folder = output or (folders[0] if len(folders) == 1 else folders[-1])
    folder.mkdir(parents=True, exist_ok=True)
    verdict = write_report(comparison, folder)
    print(as_markdown(comparison))
    print(f"{verdict} Report: {folder / 'comparison.md'}")


def compare_two(first: Run, second: Run, by: str, failures: dict[str, str]) -> Pair:
    """Two runs named outright are a pair whatever differs: the contiguous one is the baseline, else the first."""
    swap = str(second.settings.get(by)).lower() == "false" and str(first.settings.get(by)).lower() != "false"
    baseline, candidate = (second, first) if swap else (first, second)
    return compare_pair([baseline], [candidate], by, failures.get(str(first.fact("model"))))


def runs_inside(folder: Path) -> tuple[list[Run], list[FailedJob]]:
    """The run folders inside `folder`, by name; those that failed or cannot be read are listed, not compared."""
    found = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    if not found:
        raise ConfigError(f"{folder}: neither a sweep (sweep.json) nor a folder of runs (*/metrics.jsonl)")
    runs, failed = [], []
    for number, path in enumerate(found):
        try:
            run = read_run(path)
        except ConfigError as error:
            failed.append(FailedJob(number, path.name, str(error)))
            continue
        if run.summary.get("status") == "failed":
            failed.append(FailedJob(number, path.name, "the run failed"))
        else:
            runs.append(run)
    return runs, failed


def parity_failures(model_name: str, precision_name: str, image_size: int | None) -> dict[str, str]:
    """What the report says of a model whose layouts differ; empty where they agree. Prints the outcome."""
    import torch

    from cl_train.comparison.parity import check_parity, fitting_image_size
    from cl_train.models.registry import build_model, usual_image_size
    from cl_train.step.precision import resolve_precision
    from cl_train.system.distributed import choose_device

    device = choose_device("auto")
    torch.manual_seed(0)
    size = image_size or usual_image_size(model_name)
    model = build_model(model_name, num_classes=100, image_size=size)
    if image_size is None:
        size = fitting_image_size(model, size)
    precision = resolve_precision(precision_name, device)
    outcome = check_parity(model, image_size=size, precision=precision, device=device)
    print(f"{model_name}: {outcome}")
    return {} if outcome.passed else {model_name: str(outcome)}
