"""The class of each of the 50,000 validation images, from the ILSVRC2012 development kit.

The kit's ground truth file has one ILSVRC2012_ID (1 to 1000) per line. `synsets.txt` lists the WordNet ids in the order
of ILSVRC2012_ID, which is not their alphabetical order.
"""

import gzip
import re
import tarfile
import zlib
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from cl_train.config.schema import ConfigError

_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_TRUTH_BYTES = 2**20  # the official file has 0.2 MB
_MAX_KIT_BYTES = 64 * 2**20  # unpacked, 2 MB; more is a decompression bomb
_WNID = re.compile(r"n\d{8}")


def synsets() -> list[str]:
    """The 1,000 WordNet ids; ILSVRC2012_ID 1 comes first."""
    return (files("cl_train.imagenet") / "synsets.txt").read_text(encoding="ascii").split()


def validation_labels(source: str | Path) -> list[str]:
    """The WordNet id of validation image 1, 2, 3, ...

    Args:
        source: ILSVRC2012_devkit_t12.tar.gz, the folder it was unpacked to, or a text file with one label per line:
            ILSVRC2012_ID or WordNet id.

    Raises ConfigError if it is none of these, or damaged.
    """
    source = Path(source)
    try:
        lines = _ground_truth(source).decode("ascii").split()
    except ConfigError:
        raise
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError) as error:
        raise ConfigError(f"devkit={source}: cannot be read ({type(error).__name__}: {error})") from error
    if not lines:
        raise ConfigError(f"devkit={source}: no labels")
    known = synsets()
    labels = [known[int(line) - 1] if re.fullmatch(r"[1-9]\d{0,2}|1000", line) else line for line in lines]
    bad = next((label for label in labels if not _WNID.fullmatch(label)), None)
    if bad is not None:
        raise ConfigError(f"devkit={source}: {bad[:40]!r} is neither an ILSVRC2012_ID (1 to 1000) nor a WordNet id")
    return labels


def _ground_truth(source: Path) -> bytes:
    if source.is_file() and source.suffix == ".txt":
        return source.read_bytes()
    if source.is_dir():
        inner = source / "ILSVRC2012_devkit_t12"
        return ((inner if inner.is_dir() else source) / _GROUND_TRUTH).read_bytes()
    with gzip.open(source) as packed:
        content = packed.read(_MAX_KIT_BYTES + 1)
    if len(content) > _MAX_KIT_BYTES:
        raise ConfigError(
            f"devkit={source}: more than {_MAX_KIT_BYTES >> 20} MiB unpacked; this is not the official kit"
        )
    with tarfile.open(fileobj=BytesIO(content), mode="r:") as archive:
        for member in archive:
            if member.isreg() and member.name.endswith("/" + _GROUND_TRUTH) and member.size <= _MAX_TRUTH_BYTES:
                opened = archive.extractfile(member)
                assert opened is not None
                return opened.read()
    raise ConfigError(f"devkit={source}: has no {_GROUND_TRUTH}; expected ILSVRC2012_devkit_t12.tar.gz")
