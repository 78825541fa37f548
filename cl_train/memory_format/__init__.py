"""channels_last: the memory format of tensors, conversion of models, and the record of operators
that lose the format.

Read `layout.py` first, then `convert.py`, `image_axes.py` and `layout_recorder.py`. May import
step, data, system and config.
"""
