"""Convert a saved model: contiguous on disk, its layout recorded, its outputs compared before and after.

    cl-train convert resnet50.pth resnet50-nhwc.pth model=resnet50      a file of weights
    cl-train convert outputs/run/checkpoints/best.pt resnet50.safetensors   a checkpoint's weights
    cl-train convert scripted.pt scripted-nhwc.pt input=8,3,224,224     TorchScript
    cl-train convert program.pt2 program-nhwc.pt2                       an exported program
    cl-train convert a.pth b.pth memory_format=contiguous               and back

`cl_train.models.convert_file.load_model(path)` loads a file in its recorded layout. Exit codes: 1, values or outputs
differ; 2, wrong usage or an unreadable file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import settings_from_arguments
from cl_train.models.convert_file import convert_file


@dataclass
class ConvertSettings:
    memory_format: str = setting(
        "channels_last", "the layout of the model once loaded", choices=("channels_last", "contiguous")
    )
    model: str | None = setting(None, "what a file of weights belongs to; its outputs are then compared too")
    input: list[int] = setting([2, 3, 224, 224], "shape of the images for the comparison")


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        for field in dataclasses.fields(ConvertSettings):
            print(f"  {field.name}: {field.metadata['help']}")
        return 0
    files = [word for word in arguments if "=" not in word]
    if len(files) != 2:
        raise ConfigError(f"expected two files, IN and OUT, and got {len(files)}: {' '.join(files) or 'none'}")
    cfg = settings_from_arguments(ConvertSettings, [word for word in arguments if "=" in word])
    result = convert_file(
        Path(files[0]),
        Path(files[1]),
        memory_format=cfg.memory_format,
        model_name=cfg.model,
        input_shape=tuple(cfg.input),
    )
    print(result)
    return 0 if result.passed else 1
