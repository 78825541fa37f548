"""The measurements of a GPU report, their order, and which ones fit into the time limit. No device is needed."""

from dataclasses import dataclass, replace

MARGIN_S = 5.0  # between the end of a group and the end of the report
START_S = 15.0  # imports, CUDA context, first kernels
EAGER_S = 6.0  # to build a variant, warm it up and time it separately
COMPILE_S = 75.0  # the same with a cold cache of inductor
COMPILE_AGAIN_S = 20.0  # the same graph was compiled before: by another variant, group or process
BLOCKS_S = 4.0  # alternating blocks, per variant


@dataclass(frozen=True)
class Variant:
    """One way to train a model: the settings that differ between rows of a group."""

    name: str
    channels_last: bool = True
    compile: bool = False
    graph: bool = False
    timm: bool = False  # use timm's training loop


EAGER_NCHW = Variant("eager contiguous", channels_last=False)
EAGER = Variant("eager channels_last")
GRAPHED_NCHW = Variant("graphed contiguous", channels_last=False, graph=True)
GRAPHED = Variant("graphed channels_last", graph=True)
COMPILED_NCHW = Variant("compiled contiguous", channels_last=False, compile=True)
COMPILED = Variant("compiled channels_last", compile=True)
BEST = Variant("compiled graphed channels_last", compile=True, graph=True)
TIMM = Variant("timm's loop, compiled channels_last", compile=True, timm=True)


@dataclass(frozen=True)
class Group:
    """Measurements in one process, which is killed after `limit_s`.

    `variants` are prepared in this order; ratios refer to `baseline`. A group without variants takes `fixed_s`.
    """

    name: str
    limit_s: float
    fixed_s: float = 0.0
    model: str = "resnet50"
    precision: str = "fp16"
    batch_size: int = 256
    image_size: int = 224
    variants: tuple[Variant, ...] = ()
    baseline: Variant = EAGER_NCHW
    steps: int = 60  # timed steps per variant, at least
    blocks_s: float = BLOCKS_S  # alternating blocks, per variant

    @property
    def least_s(self) -> float:
        """Expected seconds of the smallest useful part of the group: the first two variants."""
        first = self.variants[:2]
        return self.fixed_s or START_S + sum(cost_s(variant) + BLOCKS_S for variant in first)


FIRST_GROUP = Group("resnet50-fp16-256", 300, variants=(BEST, EAGER_NCHW, EAGER, GRAPHED, COMPILED, TIMM))
SMALL_NETWORKS = ("resnet18", "mobilenet_v2", "squeezenet1_1")


def all_groups() -> list[Group]:
    """In order of importance."""
    return [
        Group("environment", 60, fixed_s=25),
        FIRST_GROUP,
        Group("tests", 300, fixed_s=110),
        Group("jpeg", 240, fixed_s=110),
        Group("bytes-eager", 120, fixed_s=40, batch_size=64, variants=(EAGER,)),
        Group("bytes-compiled", 180, fixed_s=90, batch_size=64, variants=(COMPILED,)),
        *(
            Group(f"{model}-fp16-32", 150, 0, model, batch_size=32, variants=(BEST, EAGER, GRAPHED), baseline=EAGER)
            for model in SMALL_NETWORKS
        ),
        Group("zoo", 420, fixed_s=300, batch_size=128, variants=(GRAPHED_NCHW, GRAPHED), baseline=GRAPHED_NCHW),
        Group("resnet50-fp16-32", 200, batch_size=32, variants=(BEST, EAGER_NCHW, EAGER, GRAPHED, GRAPHED_NCHW)),
        *(
            Group(f"resnet50-{precision}-256", 200, precision=precision, variants=(BEST, EAGER_NCHW, EAGER))
            for precision in ("bf16", "tf32", "fp16_o2")
        ),
        Group("resnet50-fp16-256-contiguous", 200, variants=(COMPILED_NCHW, EAGER_NCHW, GRAPHED_NCHW)),
    ]


def tiny_groups() -> list[Group]:
    """For a dry run on a CPU: every kind of group once, one compilation; the figures are meaningless."""
    tiny = []
    for group in all_groups():
        if group.name in (FIRST_GROUP.name, "environment", "tests", "jpeg", "bytes-eager", "zoo"):
            kept = tuple(v for v in group.variants if not v.compile or group.name == FIRST_GROUP.name)
            tiny.append(replace(group, model="tests.networks:small", variants=kept, limit_s=600, batch_size=4))
    return [replace(group, image_size=32, steps=2, blocks_s=0.0, fixed_s=min(group.fixed_s, 20)) for group in tiny]


# --- time limits ------------------------------------------------------------------------------------------------------


def cost_s(variant: Variant, *, compiled_before: bool = False) -> float:
    """Expected seconds to prepare a variant."""
    if not variant.compile:
        return EAGER_S
    return COMPILE_AGAIN_S if compiled_before else COMPILE_S


def group_limit_s(group: Group, left_s: float) -> float | None:
    """The group's time limit, seconds from its start; None if too little time is left to start it."""
    limit_s = min(group.limit_s, left_s - MARGIN_S)
    return limit_s if limit_s >= group.least_s else None


def has_time_for(variant: Variant, left_s: float, ready: int) -> bool:
    """Whether to prepare one more variant, with `ready` of them prepared that still need their alternating blocks."""
    return left_s - MARGIN_S >= cost_s(variant, compiled_before=ready > 0) + BLOCKS_S * (ready + 1)
