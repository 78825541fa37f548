"""The flags of NVIDIA apex's `examples/imagenet/main_amp.py`, which PyTorch's tutorial on
channels_last runs, as settings of this program.
"""

import argparse
from collections.abc import Sequence

_PRECISIONS = {"O0": "fp32", "O1": "fp16", "O2": "fp16_o2", "O3": "fp16"}
# What its argparse takes besides abbreviations (`--b`); flags first, then the setting.
_VALUES = (
    ("-a", "--arch", "model"),
    ("-j", "--workers", "data.workers"),
    ("--epochs", "epochs"),
    ("-b", "--batch-size", "batch_size"),
    ("--lr", "--learning-rate", "optim.lr"),
    ("--momentum", "optim.momentum"),
    ("--weight-decay", "--wd", "optim.weight_decay"),
    ("-p", "--print-freq", "log_every"),
    ("--resume", "resume"),
    ("--channels-last", "channels_last"),
    ("--loss-scale", ""),  # none: ours is dynamic
)
_SWITCHES = (
    ("-e", "--evaluate", "evaluate_only=true"),
    ("--pretrained", "weights=DEFAULT"),
    ("--deterministic", "deterministic=true"),
    ("--sync_bn", "sync_batchnorm=true"),
)
_ITS_OWN = {"-a", "--arch", "--b", "--opt-level", "--channels-last"}  # timm's train.py lacks them


def setting_of_flag(flag: str) -> str:
    """The setting of a flag that timm's and torchvision's scripts have too; empty if none has."""
    return next((key for *flags, key in _VALUES if flag in flags), "")


def settings_of_main_amp(words: Sequence[str]) -> list[str]:
    """What a command line of main_amp.py becomes here; empty if it is none."""
    if not _ITS_OWN & {word.partition("=")[0] for word in words}:
        return []
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for *flags, key in _VALUES:
        parser.add_argument(*flags, dest=key)
    for *flags, word in _SWITCHES:
        parser.add_argument(*flags, dest=word, action="store_true")
    parser.add_argument("--opt-level", dest="precision", choices=_PRECISIONS)
    try:
        options, others = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return []
    settings = []
    for key, value in vars(options).items():
        if value is True:
            settings.append(key)
        elif value and key:
            as_ours = _PRECISIONS[value] if key == "precision" else value
            settings.append(f"{key}={as_ours.lower() if key == 'channels_last' else as_ours}")
    root = [f"data.root={word}" for word in others if "=" not in word and not word.startswith("-")]
    ours = [word for word in others if "=" in word and not word.startswith("-")]
    return ["experiment=main_amp", *settings, *root[:1], *ours]
