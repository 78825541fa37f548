"""Train image classifiers and measure what the channels_last memory format is worth."""

__version__ = "0.1.0"
