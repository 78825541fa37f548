"""One training run, from a checked configuration to the last checkpoint.

Read `loop.py` first: `train()` is the whole run, top to bottom. Then `setup.py`: `set_up` opens the
data and calls `build.py` (model and step), which asks `layout_choice.py` for the memory format."""
