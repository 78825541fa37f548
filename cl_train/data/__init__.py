"""Images: from a folder of JPEGs to normalised batches on the device; docs/architecture.md has the
way in order.

Read `build.py` first: it lists the images (`images.py`: folders; `tar_shards.py`;
`user_dataset.py`: Datasets of the user), then makes the loader of each split. `for_other_loops.py`
serves other programs only, `prepare/` makes and checks data sets on disk. The package may import
system and config.
"""
