"""Models and their weights: torchvision, timm, the user's own models, and saved files.

Read `sources.py` first. May import memory_format, step, data, system and config.
"""
