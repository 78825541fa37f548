"""Train image classifiers and measure what the channels_last memory format is worth."""

import os

__version__ = "0.1.0"

# torch's profiler writes start, stop and "no GPU" lines to stderr otherwise; read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
