"""Imagenette is found, or asked for; nothing is fetched here."""

import pytest
import torchvision

from cl_train.config.schema import ConfigError
from cl_train.data.imagenette import ensure_imagenette


def test_found_directly_or_in_the_archives_folder(tmp_path):
    (tmp_path / "a" / "train").mkdir(parents=True)
    (tmp_path / "b" / "imagenette2-320" / "train").mkdir(parents=True)
    assert ensure_imagenette(tmp_path / "a", download=False) == tmp_path / "a"
    assert ensure_imagenette(tmp_path / "b", download=False) == tmp_path / "b" / "imagenette2-320"


def test_missing_says_how_to_get_it(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.download=true fetches it"):
        ensure_imagenette(tmp_path, download=False)


def test_fetching_asks_torchvision_and_failure_is_a_message(tmp_path, monkeypatch):
    asked = []

    def fetch(root, split, size, download):
        asked.append((root, size, download))
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "Imagenette", fetch)
    with pytest.raises(ConfigError, match=r"could not be fetched into .*: no network"):
        ensure_imagenette(tmp_path / "new", download=True)
    assert asked == [(str(tmp_path / "new"), "320px", True)]
