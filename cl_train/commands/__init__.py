"""The commands of `cl-train`: one short file each, which reads settings, calls other packages and prints the result.

Each has `main(words)`, which returns the exit code, and for --help a docstring (a summary, then examples), USAGE and
SETTINGS. Other packages are imported inside functions, so that --help and invalid arguments do not import torch. May
import every other package. Read `convert.py` first. The commands that measure print and
save their results with `json_result.py`.
"""

COMMANDS = {
    "train": "train a model, or with -m compare settings",
    "compare": "compare finished runs, or check that both layouts of a model compute the same",
    "benchmark": "both layouts of a model in one process: parity, speed, memory",
    "audit": "which operators lose channels_last, where, and what it costs",
    "convert": "convert a saved model and check its outputs",
    "predict": "classify a folder of images with saved weights",
    "zoo": "many models in both layouts, in one table",
    "loader_benchmark": "images per second of the data loader, against other loaders",
    "prepare_imagenet": "unpack, check and resize ImageNet",
    "completion": 'tab completion in bash: eval "$(cl-train completion)"',
}
