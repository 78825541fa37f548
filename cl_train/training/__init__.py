"""One training run, from a checked configuration to the last checkpoint.

Read `loop.py` first: `train()` is the whole run, top to bottom. Then `setup.py`: model, optimizer
and data. May import measure, models, memory_format, step, imagenet, data, system and config."""
