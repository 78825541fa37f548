"""channels_last itself: classify a tensor's layout, convert a model, and find the operators that lose the layout.

Read `convert.py` first, then `audit.py`. May import step, data, system and config.
"""
