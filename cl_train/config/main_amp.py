"""Translates the flags of NVIDIA apex's `examples/imagenet/main_amp.py`, which PyTorch's tutorial
on channels_last runs, into settings of this program.
"""

import argparse
from collections.abc import Sequence

_PRECISIONS = {"O0": "fp32", "O1": "fp16", "O2": "fp16_o2", "O3": "fp16"}
# What its argparse takes besides abbreviations (`--b`): flags, then the setting.
_FLAGS = """
    -a --arch model
    -j --workers data.workers
    --epochs epochs
    -b --batch-size batch_size
    --lr --learning-rate optim.lr
    --momentum optim.momentum
    --weight-decay --wd optim.weight_decay
    -p --print-freq log_every
    --resume resume
    --channels-last channels_last
    --opt-level precision
    --loss-scale -
    -e --evaluate evaluate_only=true
    --pretrained weights=DEFAULT
    --deterministic deterministic=true
    --sync_bn sync_batchnorm=true
"""
_SETTINGS = [line.split() for line in _FLAGS.strip().splitlines()]
_ITS_OWN = {"-a", "--arch", "--b", "--opt-level", "--channels-last"}  # timm's train.py lacks them


def setting_of_flag(flag: str) -> str:
    """Returns the setting of a flag, which timm's and torchvision's scripts may have too; or
    nothing.
    """
    return next((key for *flags, key in _SETTINGS if flag in flags and "=" not in key), "")


def settings_of_main_amp(words: Sequence[str]) -> list[str]:
    """Returns a command line of main_amp.py as settings of this program; none if it is another."""
    if not _ITS_OWN & {word.partition("=")[0] for word in words}:
        return []
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for *flags, key in _SETTINGS:
        parser.add_argument(*flags, dest=key, action="store_true" if "=" in key else "store")
    try:
        options, others = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return []
    settings = ["experiment=main_amp"]
    for key, value in vars(options).items():
        if value is True:
            settings.append(key)
        elif value and key != "-":  # our loss scale is dynamic
            ours = _PRECISIONS.get(value, value)
            settings.append(f"{key}={ours.lower() if key == 'channels_last' else ours}")
    plain = [word for word in others if not word.startswith("-")]
    root = [f"data.root={word}" for word in plain if "=" not in word]
    return [*settings, *root[:1], *(word for word in plain if "=" in word)]
