"""A folder of images copied smaller.

Decoding is most of the loader's time and grows with the number of pixels, so a smaller copy loads
faster. The cost: a second lossy compression, and small crops are enlarged from fewer pixels, so
that training images are less sharp.
"""

import os
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg

from cl_train.config.fields import suggest_path
from cl_train.data.decode import JPEG_MAGIC, BadImage, EncodedImage, read_file
from cl_train.data.images import EXTENSIONS
from cl_train.data.prepare.folders import SHOWN, resumable_folder, write_image
from cl_train.data.transforms import resized
from cl_train.data.walk import files_below
from cl_train.errors import ConfigError
from cl_train.system.processes import map_in_processes
from cl_train.system.tables import counted


def resize_folder(
    root: Path,
    out: Path,
    max_side: int | None = None,
    short_side: int | None = None,
    quality: int = 90,
    workers: int | None = None,
    overwrite: bool = False,
) -> str:
    """Copies every image below `root` to the same name below `out`, smaller. After an interruption,
    call it again.

    One side, in pixels, is limited: the longest (400 by default) or the shortest. Returns what was
    written, and the images that cannot be decoded, which are left out. Raises ConfigError;
    RuntimeError: a worker process died.
    """
    if max_side is not None and short_side is not None:
        raise ConfigError("give either max_side or short_side, not both")
    if not root.is_dir():
        raise ConfigError(f"'{root}' is not a folder{suggest_path(root)}")
    if not short_side:
        max_side = max_side or 400
    sizes = {"max_side": max_side, "short_side": short_side, "quality": quality}
    with resumable_folder(out, {"task": "resize", **sizes}, overwrite=overwrite, outside=[root]):
        names = list(map(os.fsdecode, files_below(root, EXTENSIONS).images))
        copy = partial(_copy, root, out, max_side, short_side, quality)
        results = list(map_in_processes(copy, names, workers, description="resize", unit="img"))
    written = [result for result in results if isinstance(result, tuple)]
    bad = [result for result in results if isinstance(result, str)]
    existed = len(results) - len(written) - len(bad)
    before, after = (sum(size[side] for size in written) / 2**20 for side in (0, 1))
    lines = [f"{counted(len(written), 'image')} written, {existed:,} existed already"]
    lines += [f"{before:,.1f} MiB became {after:,.1f} MiB"] if written else []
    if bad:
        lines += [
            f"not copied, as they cannot be decoded: {counted(len(bad), 'image')}:",
            *bad[:SHOWN],
        ]
    return "\n".join(lines)


def _copy(
    root: Path, out: Path, max_side: int | None, short_side: int | None, quality: int, name: str
) -> tuple[int, int] | str | None:
    """Writes an image of the required size, upright, never enlarged; a small JPEG keeps its bytes.

    Returns the bytes of the image and of its copy; path and reason of a bad image; None if the copy
    exists.
    """
    if (out / name).is_file():
        return None
    try:
        data = copy = read_file(root / name)
        encoded = EncodedImage(data, upright=True)
        pixels = encoded.decode()
    except BadImage as bad:
        return f"{root / name}: {bad}"
    size = pixels.shape[:2]
    scale = max_side / max(size) if max_side else (short_side or 1) / min(size)
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in size)
        pixels = resized(pixels, (height, width)).permute(1, 2, 0).numpy()
    if scale < 1 or encoded.needs_pillow or not data.startswith(JPEG_MAGIC):
        pixels = np.ascontiguousarray(pixels)
        copy = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="420")
    write_image(out / name, copy)
    return len(data), len(copy)
