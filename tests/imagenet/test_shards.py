"""Shards from a folder and from parquet files: the same images, order and losses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cl_train.commands.prepare_imagenet import main
from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.batch import DeviceFormat
from cl_train.data.build import build_data
from cl_train.data.folder import read_folder
from cl_train.data.shards import ShardSplit, read_shards
from cl_train.imagenet.parquet import unpack_parquet
from cl_train.imagenet.shards import write_shards
from cl_train.system.distributed import Dist
from cl_train.system.process_pool import map_in_processes
from tests.data.image_folders import CPU, encoded, jpeg, noise, write_folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = write_folder(tmp_path / "folder", train=22, val=7)
    (root / "train/class_0/0001.5-a.JPEG").write_bytes(jpeg(50, 40))
    (root / "train/class_0/0001.png").write_bytes(encoded(noise(30, 40), "PNG"))
    return root


def test_shards_hold_the_folders_images_in_the_folders_order(folder: Path, tmp_path: Path) -> None:
    images, bad = write_shards(folder, tmp_path / "shards", images_per_shard=7, workers=2)
    assert bad == [] and sorted(images.values()) == [6, 6, 6, 6, 7]
    source, shards = read_folder(folder), read_shards(tmp_path / "shards", workers=2)
    assert shards.classes == source.classes
    for ours, theirs in ((shards.train, source.train), (shards.val, source.val)):
        assert np.array_equal(ours.labels, theirs.labels)
        assert [ours.read(index) for index in range(len(ours))] == [theirs.read(index) for index in range(len(theirs))]
    assert isinstance(shards.train, ShardSplit)
    assert all(len(set(shards.train.labels[shard])) == 2 for shard in shards.train.by_shard()), "classes are mixed"


def losses(name: str, root: Path, workers: int = 0, **settings: str) -> tuple[list[float], list[float]]:
    """Of a fixed network over two epochs and the validation images; it depends on every pixel and label."""
    cfg = DataConfig(name=name, root=str(root), image_size=32, workers=workers, **settings)  # type: ignore[arg-type]
    data = build_data(cfg, AugmentConfig(), batch_size=4, seed=3, dist=Dist(0, 1, CPU))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.Flatten(), torch.nn.Linear(8 * 64, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    form = DeviceFormat(CPU, torch.float32, torch.channels_last)
    train = []
    for epoch in range(2):
        for batch in data.train(epoch, form):
            loss = torch.nn.functional.cross_entropy(model(batch.images), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train.append(loss.item())
    val = [torch.nn.functional.cross_entropy(model(b.images), b.targets).item() for b in data.validation(form)]
    data.close()
    return train, val


def test_training_on_shards_has_the_losses_of_the_folder(folder: Path, tmp_path: Path) -> None:
    write_shards(folder, tmp_path / "shards", images_per_shard=5, workers=1)
    reference = losses("folder", folder)
    assert len(reference[0]) == 12 and losses("shards", tmp_path / "shards", workers=2) == reference
    by_shard = losses("shards", tmp_path / "shards", shuffle="shards")
    assert by_shard[0] != reference[0] and by_shard == losses("shards", tmp_path / "shards", shuffle="shards")


def test_an_interrupted_writer_continues(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(folder, tmp_path / "reference", images_per_shard=7, workers=1)
    out = tmp_path / "out"

    def two_shards(*arguments: object, **options: object) -> object:
        results = map_in_processes(*arguments, **options)  # type: ignore[arg-type]
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr("cl_train.imagenet.shards.map_in_processes", two_shards)
    with pytest.raises(KeyboardInterrupt):
        write_shards(folder, out, images_per_shard=7, workers=1)
    assert len(list(out.glob("*.tar"))) == 2 and not (out / "shards.json").exists()
    monkeypatch.undo()
    (out / ".imagenet-train-000002.tar.part").write_bytes(b"half")
    kept = (out / "imagenet-train-000000.tar").stat().st_mtime_ns
    write_shards(folder, out, images_per_shard=7, workers=1)
    for path in (tmp_path / "reference").glob("[!.]*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert (out / "imagenet-train-000000.tar").stat().st_mtime_ns == kept
    with pytest.raises(ConfigError, match="images_per_shard"):
        write_shards(folder, out, images_per_shard=8, workers=1)


def test_unreadable_files_are_reported_and_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "train/class_1/empty.jpg").write_bytes(b"")
    images, bad = write_shards(folder, tmp_path / "shards", workers=1)
    assert sum(images.values()) == 31 and len(bad) == 1 and "empty.jpg" in bad[0]
    assert len(read_shards(tmp_path / "shards").train) == 24


# --- parquet ----------------------------------------------------------------------------------------------------------

WNIDS = ("n01440764", "n01443537")


def write_parquet(root: Path, labels: tuple[int, ...] = (0, 1)) -> dict[str, bytes]:
    """Two train files and one validation file as on the Hugging Face hub. Returns the images by official name."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    root.mkdir(parents=True, exist_ok=True)
    images = {}
    for file, count in (("train-00000-of-00002", 5), ("train-00001-of-00002", 4), ("validation-00000-of-00001", 4)):
        rows = []
        for number in range(count):
            label = number % 2
            wnid, stem = WNIDS[label], f"{file[:5]}{file[10]}_{number}"
            data = jpeg(20 + number, 30, seed=number)
            images[f"{wnid}/{stem}"] = data
            rows.append({"image": {"bytes": data, "path": f"{stem}_{wnid}.JPEG"}, "label": labels[label]})
        pq.write_table(pa.Table.from_pylist(rows), root / f"{file}.parquet", row_group_size=2)
    return images


def test_parquet_files_become_a_folder_with_the_official_names(tmp_path: Path) -> None:
    images = write_parquet(tmp_path / "data")
    for _ in range(2):
        assert unpack_parquet(tmp_path, tmp_path / "out", to="folder", workers=2) == {"train": 9, "val": 4}
    found = {f"{p.parent.name}/{p.stem}": p.read_bytes() for p in (tmp_path / "out").rglob("*.JPEG")}
    assert found == images
    assert read_folder(tmp_path / "out").classes == WNIDS


def test_parquet_files_become_shards(tmp_path: Path) -> None:
    images = write_parquet(tmp_path / "data")
    assert main(["parquet", f"data.root={tmp_path}", f"out={tmp_path / 'out'}", "to=shards"]) == 0
    source = read_shards(tmp_path / "out")
    assert source.classes == WNIDS and (len(source.train), len(source.val)) == (9, 4)
    found = {split.read(index) for split in (source.train, source.val) for index in range(len(split))}
    assert found == set(images.values())
    assert json.loads((tmp_path / "out/shards.json").read_text())["images"]["imagenet-train-000001.tar"] == 4


def test_wrong_parquet_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files"):
        unpack_parquet(tmp_path, tmp_path / "out", to="folder")
    write_parquet(tmp_path / "data", labels=(0, 0))
    with pytest.raises(ConfigError, match="label 0"):
        unpack_parquet(tmp_path, tmp_path / "out", to="folder", workers=1)
    write_parquet(tmp_path / "data")
    (tmp_path / "data/train-00000-of-00002.parquet").rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match="1 of 2 train"):
        unpack_parquet(tmp_path, tmp_path / "out", to="folder", workers=1)
    (tmp_path / "kept").rename(tmp_path / "data/train-00000-of-00002.parquet")
    damaged = tmp_path / "data/train-00001-of-00002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="train-00001"):
        unpack_parquet(tmp_path, tmp_path / "out", to="folder", workers=1)
    assert not (tmp_path / "out").exists()
