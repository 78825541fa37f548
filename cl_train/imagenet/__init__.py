"""Data sets on disk: ImageNet's official archives and any parquet files unpacked, folders checked,
resized, sharded.

Read `archives.py` first. May import data, system and config.
"""
