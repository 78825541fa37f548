"""One training run, from a checked configuration to the last checkpoint.

Read `loop.py` first: `train()` is the whole run, top to bottom. Then `setup.py`: `set_up` takes the
settings apart, with `parts.py`; its `build_state` has `build.py` build the model,
`layout_choice.py` choose its memory format, and `build.py` make the step."""
