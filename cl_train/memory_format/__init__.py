"""channels_last: the memory format of tensors, conversion of models, and the audit of operators
that lose the format.

Read `layout.py` first, then `convert.py`, `image_axes.py` and `audit.py`. May import step, data,
system and config.
"""
