"""A smaller copy of an image folder: same layout and names, one side limited, JPEG.

Decoding is most of the loader's time and grows with the number of pixels, so a smaller copy loads faster. The cost: a
second lossy compression, and small crops are enlarged from fewer pixels, so that training images are less sharp.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.folder import EXTENSIONS, files_below
from cl_train.data.transforms import resized
from cl_train.imagenet.resumable import resumable_folder, write_image
from cl_train.system.processes import map_in_processes

_DEFAULT_MAX_SIDE = 400
_SHOWN = 5


def resize_folder(
    root: Path,
    out: Path,
    max_side: int | None = None,
    short_side: int | None = None,
    quality: int = 90,
    workers: int | None = None,
    overwrite: bool = False,
) -> str:
    """Copy every image below `root` to the same name below `out`, smaller. After an interruption, call it again.

    One side, in pixels, is limited: the longest (400 by default) or the shortest. Returns what was written, and the
    images that cannot be decoded, which are left out. Raises ConfigError: a folder that cannot be read, or an unusable
    `out`; RuntimeError: a worker process died.
    """
    if max_side is not None and short_side is not None:
        raise ConfigError("give either max_side or short_side, not both")
    if not root.is_dir():
        raise ConfigError(f"'{root}' is not a folder")
    if not short_side:
        max_side = max_side or _DEFAULT_MAX_SIDE
    settings = {"task": "resize", "max_side": max_side, "short_side": short_side, "quality": quality}
    with resumable_folder(out, settings, overwrite=overwrite, outside=[root]):
        files = (os.path.join(below, name) for below, names in files_below(str(root)) for name in names)
        names = sorted(os.path.relpath(file, root) for file in files if file.lower().endswith(EXTENSIONS))
        copy = partial(_copy, root, out, partial(_smaller, max_side=max_side, short_side=short_side, quality=quality))
        results = list(map_in_processes(copy, names, workers, description="resize", unit="img"))
    written = [result for result in results if isinstance(result, tuple)]
    bad = [result for result in results if isinstance(result, str)]
    lines = [f"{len(written):,} images written, {len(results) - len(written) - len(bad):,} existed already"]
    if written:
        before, after = (sum(sizes) / 2**20 for sizes in zip(*written, strict=True))
        lines.append(f"{before:,.1f} MiB became {after:,.1f} MiB")
    if bad:
        lines += [f"{len(bad):,} images cannot be decoded and were not copied:", *bad[:_SHOWN]]
    return "\n".join(lines)


def _copy(root: Path, out: Path, smaller: Callable[[bytes], bytes], name: str) -> tuple[int, int] | str | None:
    """Bytes of the image and of its copy; or path and reason of a bad image; or None if the copy exists."""
    if (out / name).is_file():
        return None
    try:
        data = read_file(root / name)
        copy = smaller(data)
    except BadImage as bad:
        return f"{root / name}: {bad}"
    write_image(out / name, copy)
    return len(data), len(copy)


def _smaller(data: bytes, max_side: int | None, short_side: int | None, quality: int) -> bytes:
    """A JPEG of the required size, never enlarged, decoded again to verify it; a small JPEG keeps its bytes."""
    encoded = Encoded(data)
    size = encoded.height, encoded.width
    scale = max_side / max(size) if max_side else (short_side or 1) / min(size)
    pixels = encoded.decode()
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in size)
        pixels = resized(pixels, None, (height, width))[0].permute(1, 2, 0).numpy()
    elif data.startswith(JPEG_MAGIC) and not encoded.needs_pillow:
        return data
    copy: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=quality, colorsubsampling="420")
    if simplejpeg.decode_jpeg(copy, strict=True).shape != pixels.shape:
        raise BadImage("the smaller copy does not decode to the size that was written")
    return copy
