"""Data sets on disk: ImageNet's official archives unpacked, folders checked, resized, sharded.

Read `archives.py` first. May import the files of data.
"""
