"""The machine around a run: processes, signals, files that survive kills, versions and load.

Read `checkpoint_file.py` for how files are written. May import config.
"""
