"""Convert a saved model: contiguous on disk, its memory format recorded, its outputs compared before and after.

    cl-train convert resnet50.pth out=resnet50-nhwc.pth model=resnet50           a file of weights
    cl-train convert checkpoint.ckpt out=weights.pth model=resnet50 entry=state_dict prefix=model.
    cl-train convert outputs/RUN/checkpoints/best.pt out=resnet50.safetensors    the weights of a checkpoint
    cl-train convert scripted.pt out=scripted-nhwc.pt input=8,3,224,224 trust=true   TorchScript
    cl-train convert program.pt2 out=program-nhwc.pt2 trust=true                 an exported program
    cl-train convert a.pth out=b.pth channels_last=false                         convert back to contiguous

trust=true loads a program, which runs its code: use it only for files whose source you trust.
Exit codes: 0 converted and outputs equal; 1 not converted, or outputs not compared or different; 2 wrong usage or an
unreadable file.
"""

from dataclasses import dataclass
from pathlib import Path

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import is_setting, settings_from_arguments


@dataclass
class ConvertSettings:
    """Convert a saved model; its values and outputs are compared before and after."""

    out: str = setting("", "file to write", required=True)
    channels_last: bool = setting(True, "the layout of the model when it is loaded; false = contiguous")
    model: str | None = setting(None, "the model that a file of weights belongs to; its outputs are then compared too")
    input: list[int] = setting([2, 3, 224, 224], "shape of the random images for the comparison", minimum=1)
    entry: str | None = setting(None, "which entry of a checkpoint holds the weights, such as model_ema")
    prefix: str | None = setting(None, "take only the names with this prefix, such as backbone., and remove it")
    output_entry: str | None = setting(None, "which entry of the model's output is compared: a dict's key or an index")
    trust: bool = setting(False, "load a TorchScript or exported program, which runs the code in the file")


USAGE = "FILE out=FILE [key=value ...]"
SETTINGS = {"settings": ConvertSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(ConvertSettings, [word for word in words if is_setting(word)])
    files = [word for word in words if not is_setting(word)]
    if len(files) != 1:
        raise ConfigError(f"expected one file and out=FILE, got {len(files)} files: {' '.join(files)}")
    import torch

    from cl_train.models.convert_file import convert_file

    result = convert_file(
        Path(files[0]),
        Path(settings.out),
        memory_format=torch.channels_last if settings.channels_last else torch.contiguous_format,
        model_name=settings.model,
        input_shape=tuple(settings.input),
        entry=settings.entry,
        prefix=settings.prefix,
        output=settings.output_entry,
        trust=settings.trust,
    )
    print(result)
    return 0 if result.passed else 1
