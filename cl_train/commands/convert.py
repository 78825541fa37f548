"""Convert a saved model to another memory format or kind of file; the new file is run and compared
with the original.

    cl-train convert resnet50.pth out=resnet50-nhwc.pth model=resnet50           a file of weights
    cl-train convert checkpoint.ckpt out=weights.pth model=resnet50 entry=state_dict prefix=model.
    cl-train convert outputs/RUN out=resnet50.safetensors             the best checkpoint of a run
    cl-train convert outputs/RUN entry=average out=ema.onnx           its EMA, for onnxruntime
    cl-train convert resnet50 weights=DEFAULT out=resnet50.pt2                   a model of the zoo
    cl-train convert scripted.pt out=nhwc.pt input=8,3,224,224 trust=true          TorchScript

Weights are contiguous on disk, with their memory format recorded; programs keep the strides of
channels_last. trust=true runs the code in the file.
Exit codes: 0 converted and outputs equal; 1 not converted (then no file is written), or the outputs
not compared; 2 wrong usage or an unreadable file.
"""

from dataclasses import dataclass

from cl_train.commands import settings_and_files
from cl_train.config.fields import Range
from cl_train.config.schema import OVERWRITE_HELP, setting
from cl_train.errors import ConfigError


@dataclass
class ConvertSettings:
    """Convert a saved model; its values and outputs are compared before and after."""

    out: str = setting("", "file to write", required=True)
    channels_last: bool = setting(True, "the layout of the model when it is loaded")
    overwrite: bool = setting(False, OVERWRITE_HELP)
    model: str | None = setting(None, "the model of a file of weights; null = the file names it")
    weights: str | None = setting(None, "of a model given by name: DEFAULT, ..., or a file")
    input: list[int] = setting([], "shape of random images to compare with; empty = 2", Range(1))
    entry: str | None = setting(None, "entry of a checkpoint that holds the weights: model_ema")
    prefix: str | None = setting(None, "take only the names with it, and remove it: backbone.")
    trust: bool = setting(False, "load a program, which runs the code in the file")


USAGE = "FILE|RUN|MODEL out=FILE [key=value ...]"
SETTINGS = {"settings": ConvertSettings}


def main(words: list[str]) -> int:
    settings, files = settings_and_files(ConvertSettings, words)
    if len(files) != 1:
        what = "expected one file, run folder or model, and out=FILE"
        raise ConfigError(f"{what}; got {len(files)}: {' '.join(files)}")
    from cl_train.models.convert_file import NotConverted, convert_file

    try:
        done, is_proved = convert_file(files[0], **vars(settings))
    except NotConverted as error:
        done, is_proved = f"not converted, no file was written: {error}", False
    print(done)
    return 0 if is_proved else 1
