"""Images: from a folder of JPEGs to normalised batches on the device.

Read `build.py` first (which data set), then `loader.py` (how a batch is made). May import system and config.
"""
