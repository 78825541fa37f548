"""One training run, from a checked configuration to the last checkpoint.

Read `loop.py` first: `train()` is the whole run, top to bottom. Then `setup.py`, which takes the configuration apart
and builds model, optimizer and data. May import every room below: comparison, models, memory_format, step, imagenet,
data, system and config.
"""
