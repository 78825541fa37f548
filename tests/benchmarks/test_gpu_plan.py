"""Which groups of the GPU report run within a time limit."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from benchmarks.gpu_plan import (
    BEST,
    BLOCKS_S,
    EAGER,
    FIRST_GROUP,
    GRAPHED_NCHW,
    MARGIN_S,
    START_S,
    Group,
    all_groups,
    cost_s,
    group_limit_s,
    has_time_for,
    tiny_groups,
)

GROUPS = all_groups()


class PlannedGroup(NamedTuple):
    """The simulated duration and variants of a group: no seconds and no variants if it is left out."""

    group: Group
    seconds: float = 0.0
    variants: tuple[str, ...] = ()


def simulate(groups: Sequence[Group], time_limit_s: float) -> list[PlannedGroup]:
    """The groups and variants that run within the limit, with the durations expected above."""
    planned: list[PlannedGroup] = []
    compiled: set[tuple[object, ...]] = set()
    for group in groups:
        limit_s = group_limit_s(group, time_limit_s - sum(row.seconds for row in planned))
        if limit_s is None:
            planned.append(PlannedGroup(group))
            continue
        seconds, names = group.fixed_s or START_S, list[str]()
        for variant in group.variants:
            graph = (group.model, group.precision, group.batch_size, variant.channels_last, variant.timm)
            if group.fixed_s or has_time_for(variant, limit_s - seconds, len(names)):
                names.append(variant.name)
                if not group.fixed_s:
                    seconds += cost_s(variant, compiled_before=graph in compiled) + BLOCKS_S
                    compiled.update([graph] if variant.compile else [])
        planned.append(PlannedGroup(group, min(seconds, limit_s), tuple(names)))
    return planned


@pytest.mark.parametrize("limit_s", [30.0, 300.0, 520.0, 1800.0, 10_000.0])
def test_a_plan_keeps_its_limits_and_the_order(limit_s: float) -> None:
    planned = simulate(GROUPS, limit_s)
    assert [row.group.name for row in planned] == [group.name for group in GROUPS]
    assert sum(row.seconds for row in planned) <= limit_s - MARGIN_S
    assert all(row.seconds <= row.group.limit_s for row in planned)


def test_the_first_comparison_is_complete_in_300_s() -> None:
    planned = {row.group.name: row for row in simulate(GROUPS, 300)}
    assert planned["environment"].seconds > 0
    assert planned[FIRST_GROUP.name].variants == tuple(variant.name for variant in FIRST_GROUP.variants)


def test_tests_and_jpegs_fit_into_520_s_and_nearly_all_into_1800_s() -> None:
    in_520 = {row.group.name for row in simulate(GROUPS, 520) if row.seconds}
    assert in_520 >= {"environment", FIRST_GROUP.name, "tests", "jpeg"}
    left_out = [row.group.name for row in simulate(GROUPS, 1800) if not row.seconds]
    assert left_out == ["resnet50-fp16-256-contiguous"]
    assert all(row.seconds for row in simulate(GROUPS, 2000))


def test_every_group_has_time_for_all_its_variants_with_a_cold_cache() -> None:
    """Small batches too: the best path is measured first, and its compilation fits into the group's limit."""
    for group in GROUPS:
        if not group.fixed_s:
            (planned,) = simulate([group], 10_000)
            assert planned.variants == tuple(variant.name for variant in group.variants), group.name
            assert planned.seconds + MARGIN_S <= group.limit_s, group.name
    for name in ("resnet18", "mobilenet_v2", "squeezenet1_1", "resnet50"):
        group = next(group for group in GROUPS if group.model == name and group.batch_size == 32)
        assert group.variants[0] is BEST and group.baseline in group.variants


def test_the_combinations() -> None:
    names = [group.name for group in GROUPS]
    assert names[0] == "environment" and len(set(names)) == len(names)
    assert {g.precision for g in GROUPS if g.model == "resnet50" and g.batch_size == 256} == {
        "fp16", "bf16", "tf32", "fp16_o2",
    }  # fmt: skip
    zoo = next(group for group in GROUPS if group.name == "zoo")
    assert all(variant.graph for variant in zoo.variants) and zoo.baseline is GRAPHED_NCHW
    assert zoo.batch_size >= 128 and zoo.steps >= 50


def test_the_rules_of_the_runner() -> None:
    group = Group("g", 200, variants=(EAGER, BEST))
    assert group_limit_s(group, 1000) == 200
    assert group_limit_s(group, group.least_s + MARGIN_S) == group.least_s
    assert group_limit_s(group, group.least_s + MARGIN_S - 1) is None
    assert cost_s(BEST) > cost_s(BEST, compiled_before=True) > cost_s(EAGER)
    assert has_time_for(EAGER, 20, ready=0) and not has_time_for(BEST, 20, ready=0)
    assert has_time_for(EAGER, 20, ready=1) and not has_time_for(EAGER, 20, ready=5)


def test_a_dry_run_has_every_kind_of_group() -> None:
    names = {group.name for group in tiny_groups()}
    assert names >= {"environment", FIRST_GROUP.name, "tests", "jpeg", "bytes-eager", "zoo"}
    assert all(group.image_size == 32 and group.steps == 2 for group in tiny_groups())
