"""Convert a saved model: contiguous on disk, its memory format recorded, its outputs compared before and after.

    cl-train convert resnet50.pth resnet50-nhwc.pth model=resnet50          a file of weights
    cl-train convert checkpoint.ckpt weights.pth model=resnet50 entry=state_dict prefix=model.
    cl-train convert outputs/run/checkpoints/best.pt resnet50.safetensors   the weights of a checkpoint
    cl-train convert scripted.pt scripted-nhwc.pt input=8,3,224,224 trust=true   TorchScript
    cl-train convert program.pt2 program-nhwc.pt2 trust=true                an exported program
    cl-train convert a.pth b.pth memory_format=contiguous                   and back

trust=true loads a program, which runs its code: use it only for files whose source you trust.
Exit codes: 0 converted and outputs equal; 1 not converted, or outputs not compared or different; 2 wrong usage or an
unreadable file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import setting_fields, settings_from_arguments


@dataclass
class ConvertSettings:
    memory_format: str = setting(
        "channels_last", "the memory format of the model once loaded", choices=("channels_last", "contiguous")
    )
    model: str | None = setting(None, "the model that a file of weights belongs to, so that its outputs are compared")
    input: list[int] = setting([2, 3, 224, 224], "shape of the random images for the comparison")
    entry: str | None = setting(None, "which entry of a checkpoint holds the weights, such as model_ema")
    prefix: str | None = setting(None, "take only the names with this prefix, such as backbone., and remove it")
    output: str | None = setting(None, "which entry of the model's output is compared: a dict's key or an index")
    trust: bool = setting(False, "load a TorchScript or exported program, which runs the code in the file")


def main(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(__doc__)
        for name, field in setting_fields(ConvertSettings).items():
            print(f"  {name:<14} {field.metadata['help']}")
        return 0
    files = [word for word in words if "=" not in word]
    if len(files) != 2:
        raise ConfigError(f"expected two files, IN and OUT, and got {len(files)}: {' '.join(files) or 'none'}")
    settings = settings_from_arguments(ConvertSettings, [word for word in words if "=" in word])

    from cl_train.memory_format.names import memory_format_named
    from cl_train.models.convert_file import convert_file

    result = convert_file(
        Path(files[0]),
        Path(files[1]),
        memory_format=memory_format_named(settings.memory_format),
        model_name=settings.model,
        input_shape=tuple(settings.input),
        entry=settings.entry,
        prefix=settings.prefix,
        output=settings.output,
        trust=settings.trust,
    )
    print(result)
    return 0 if result.passed else 1
