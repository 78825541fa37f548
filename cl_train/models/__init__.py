"""Models and their weights: torchvision, timm and the user's own, saved files, and changes to a model's structure.

Read `registry.py` first. May import memory_format, step, data, system and config.
"""
