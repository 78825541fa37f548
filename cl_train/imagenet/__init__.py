"""ImageNet on disk: from the official archives to folders, checked and resized.

Read `archives.py` first. May import data, system and config.
"""
