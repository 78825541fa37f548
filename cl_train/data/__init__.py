"""Images: from a folder of JPEGs to normalised batches on the device.

Read `build.py` first: it chooses the source of the images, then the loader. A new source of images is one module with
`read_<name>(root) -> ImageSource` (its splits extend `Split` of `source.py`, as in `folder.py` and `shards.py`) and one
branch in `build.py`.

An image passes through `folder.py` or `shards.py` (its bytes), `decode.py` (pixels), `transforms.py` (crop, resize,
flip; `ImageReader` does all of it); `loader.py` with `workers.py` (batches in shared memory), and `device.py`.
`user_dataset.py` reads a Dataset of the user instead. `image_loader.py` and `collate.py` serve other programs only. May
import system and config.
"""
