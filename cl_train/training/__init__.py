"""One training run, from a checked configuration to the last checkpoint.

Read `loop.py` first: `train()` is the whole run, top to bottom. Then `setup.py`: `set_up` takes the
settings apart, with `parts.py`, and calls `build.py` (model and step), which asks
`layout_choice.py` for the memory format."""
