"""Imagenette: ten easy classes of ImageNet (fast.ai), at 320 pixels, through torchvision."""

from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.system.locks import lock_file

FOLDER = "imagenette2-320"  # as in the archive


def ensure_imagenette(root: Path, *, download: bool) -> Path:
    """The folder with train/ and val/: `root` itself, or the archive's folder in it, which `download` fetches (326 MB).

    Raises ConfigError if it is missing without `download`, or if the download failed.
    """
    if (root / "train").is_dir():
        return root
    if (root / FOLDER / "train").is_dir():
        return root / FOLDER
    if not download:
        raise ConfigError(
            f"no Imagenette in '{root}'; data.download=true fetches it (326 MB); or give data.root=FOLDER of a copy"
        )
    from torchvision.datasets import Imagenette

    root.mkdir(parents=True, exist_ok=True)
    with lock_file(root / ".lock", waiting_for="Imagenette"):
        try:
            Imagenette(str(root), split="train", size="320px", download=not (root / FOLDER / "train").is_dir())
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"Imagenette could not be fetched into '{root}': {error}") from None
    return root / FOLDER
