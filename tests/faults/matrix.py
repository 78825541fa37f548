"""The fault matrix: which rows there are, and how often each is tried, quickly (each change) or in full."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import archive_faults
import checkpoint_faults
import config_fuzz
import image_faults
import place_faults
import rank_faults
import run_faults
import sample_faults
import sweep_faults
import tiny
import watch_faults
from outcome import Outcome
from run_faults import Bench

QUICK_STEPS = [1, 6, 11, 12]
ALL_STEPS = list(range(1, tiny.STEPS + 1))


@dataclass(frozen=True)
class Row:
    """One kind of fault; `run(bench, folder, seed)` plants it."""

    quick: Callable[[Bench, Path, int], Outcome]
    full: Callable[[Bench, Path, int], Outcome]


MATRIX: dict[str, Row] = {
    "R1": Row(
        lambda b, f, s: checkpoint_faults.killed_writers(b.server, f, 25, s),
        lambda b, f, s: checkpoint_faults.killed_writers(b.server, f, 1000, s),
    ),
    "R2": Row(lambda b, f, s: run_faults.killed_runs(b, 5, s), lambda b, f, s: run_faults.killed_runs(b, 200, s)),
    "R3": Row(lambda b, f, s: rank_faults.killed_ranks(b, 1, s), lambda b, f, s: rank_faults.killed_ranks(b, 40, s)),
    "R3-torchrun": Row(
        lambda b, f, s: rank_faults.restarts_only(b, s), lambda b, f, s: rank_faults.under_torchrun(b, s)
    ),
    "R4": Row(lambda b, f, s: run_faults.polite_stops(b, 3, s), lambda b, f, s: run_faults.polite_stops(b, 100, s)),
    "R5": Row(
        lambda b, f, s: checkpoint_faults.failing_writes(f, 20, s),
        lambda b, f, s: checkpoint_faults.failing_writes(f, 300, s),
    ),
    "R5-run": Row(
        lambda b, f, s: watch_faults.full_disks(b, s, False), lambda b, f, s: watch_faults.full_disks(b, s, True)
    ),
    "R6": Row(
        lambda b, f, s: checkpoint_faults.truncated(f, 50, s), lambda b, f, s: checkpoint_faults.truncated(f, 1000, s)
    ),
    "R7": Row(
        lambda b, f, s: checkpoint_faults.flipped(f, 50, s), lambda b, f, s: checkpoint_faults.flipped(f, 2000, s)
    ),
    "R8": Row(
        lambda b, f, s: run_faults.resume_everywhere(b, s, QUICK_STEPS, [0]),
        lambda b, f, s: run_faults.resume_everywhere(b, s, ALL_STEPS, [0, 1, 3]),
    ),
    "R9": Row(
        lambda b, f, s: sample_faults.sample_accounting(f, 20, s),
        lambda b, f, s: sample_faults.sample_accounting(f, 500, s),
    ),
    "R10": Row(
        lambda b, f, s: rank_faults.other_world_sizes(b, s, False),
        lambda b, f, s: rank_faults.other_world_sizes(b, s, True),
    ),
    "R11": Row(
        lambda b, f, s: run_faults.resume_in_another_form(b, s, False),
        lambda b, f, s: run_faults.resume_in_another_form(b, s, True),
    ),
    "R12": Row(
        lambda b, f, s: watch_faults.bad_numbers(b, s, False), lambda b, f, s: watch_faults.bad_numbers(b, s, True)
    ),
    "R13": Row(
        lambda b, f, s: watch_faults.collapsing_scale(b, s, False),
        lambda b, f, s: watch_faults.collapsing_scale(b, s, True),
    ),
    "R14": Row(lambda b, f, s: watch_faults.bad_workers(b, s, 1), lambda b, f, s: watch_faults.bad_workers(b, s, 10)),
    "R15": Row(lambda b, f, s: rank_faults.hung_ranks(b, 1, s), lambda b, f, s: rank_faults.hung_ranks(b, 5, s)),
    "R16": Row(
        lambda b, f, s: image_faults.fuzzed_images(f, 1000, s),
        lambda b, f, s: image_faults.fuzzed_images(f, 100_000, s),
    ),
    "R17": Row(lambda b, f, s: image_faults.odd_files(f, s), lambda b, f, s: image_faults.odd_files(f, s)),
    "R18": Row(
        lambda b, f, s: archive_faults.hostile_archives(f, s), lambda b, f, s: archive_faults.hostile_archives(f, s)
    ),
    "R18-kill": Row(
        lambda b, f, s: archive_faults.killed_prepare(b.server, f, 5, s),
        lambda b, f, s: archive_faults.killed_prepare(b.server, f, 20, s),
    ),
    "R19": Row(lambda b, f, s: checkpoint_faults.malicious(f, s), lambda b, f, s: checkpoint_faults.malicious(f, s)),
    "R20": Row(lambda b, f, s: config_fuzz.fuzzed_settings(s, 40), lambda b, f, s: config_fuzz.fuzzed_settings(s)),
    "R20-typos": Row(lambda b, f, s: config_fuzz.misspelt_keys(s, 1), lambda b, f, s: config_fuzz.misspelt_keys(s, 10)),
    "R21": Row(
        lambda b, f, s: place_faults.odd_surroundings(b, s), lambda b, f, s: place_faults.odd_surroundings(b, s)
    ),
    "R22": Row(lambda b, f, s: place_faults.shared_folders(b, s), lambda b, f, s: place_faults.shared_folders(b, s)),
    "R23": Row(lambda b, f, s: place_faults.long_run(b, s, 1_500), lambda b, f, s: place_faults.long_run(b, s, 10_000)),
    "R25": Row(lambda b, f, s: sweep_faults.failing_jobs(b, s, 1), lambda b, f, s: sweep_faults.failing_jobs(b, s, 7)),
}
# A try of R20-typos may be lost: no one can guess every word. The bar is the share.
ENOUGH = {"R20-typos": 0.95}


def passes(name: str, outcome: Outcome) -> bool:
    return outcome.tried > 0 and outcome.survived >= ENOUGH.get(name, 1.0) * outcome.tried
