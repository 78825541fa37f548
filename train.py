"""Train an image classifier and measure the effect of the channels_last memory format.

    python train.py channels_last=true                       on sample data, generated on first use
    python train.py -m channels_last=true,false repeats=4    compare the layouts; ends in a verdict
    torchrun --standalone --nproc-per-node=8 train.py experiment=resnet50_90ep data.root=FOLDER

`python train.py --help` lists the settings. The entry point is in cl_train/commands/train.py,
and the run itself is `train` in cl_train/training/loop.py.
"""

from cl_train.cli import program

if __name__ == "__main__":
    program("train")
