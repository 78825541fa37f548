"""From the parquet files of the Hugging Face hub and of `datasets` to folders and shards."""

import json

import pytest

from cl_train.commands.prepare_imagenet import main
from cl_train.data.images import list_folder
from cl_train.data.tar_shards import list_shards
from cl_train.errors import ConfigError
from cl_train.imagenet.parquet import unpack_parquet
from tests.data.image_folders import encoded, jpeg, noise

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
WNIDS = ("n01440764", "n01443537")


def write_parquet(root):
    """The files of Hugging Face's hub; returns the images by official name."""
    root.mkdir(parents=True, exist_ok=True)
    images = {}
    counts = {"train-00000-of-00002": 5, "train-00001-of-00002": 4, "validation-00000-of-00001": 4}
    for file, count in counts.items():
        rows = []
        for number in range(count):
            wnid, stem = WNIDS[number % 2], f"{file[:5]}{file[10]}_{number}"
            data = images[f"{wnid}/{stem}"] = jpeg(20 + number, 30, seed=number)
            image = {"bytes": data, "path": f"{stem}_{wnid}.JPEG"}
            rows.append({"image": image, "label": number % 2})
        pq.write_table(pa.Table.from_pylist(rows), root / f"{file}.parquet", row_group_size=2)
    return images


def write_table(path, images, labels, names=None, columns="image label"):
    """As `datasets` writes it, with a ClassLabel of these `names`."""
    image, label = columns.split()
    path.parent.mkdir(parents=True, exist_ok=True)
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({image: pa.array(images, struct), label: labels})
    if names is not None:
        features = {"tags": [{"_type": "Value"}], image: {"_type": "Image"}}
        features |= {label: {"names": names, "_type": "ClassLabel"}, "boxes": [{"_type": "Value"}]}
        document = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": document})
    pq.write_table(table, path)


@pytest.mark.slow
def test_the_hubs_files_become_a_folder_with_the_official_names_or_shards(tmp_path):
    images = write_parquet(tmp_path / "data")
    folder, shards = tmp_path / "folder", tmp_path / "shards"
    for _ in range(2):
        counts = unpack_parquet(tmp_path, folder, to="folder", workers=2)
        assert counts == {"train": 9, "val": 4}
    found = {f"{p.parent.name}/{p.stem}": p.read_bytes() for p in folder.rglob("*.JPEG")}
    assert found == images and list_folder(folder).classes == WNIDS
    assert main(["parquet", f"data.root={tmp_path / 'data'}", f"out={shards}", "to=shards"]) == 0
    source = list_shards(shards)
    assert source.classes == WNIDS and (len(source.train), len(source.val)) == (9, 4)
    splits = (source.train, source.val)
    contents = {split.read(index) for split in splits for index in range(len(split))}
    assert contents == set(images.values())
    manifest = json.loads((shards / "shards.json").read_text())
    assert manifest["images"]["data-train-000001.tar"] == 4


@pytest.mark.parametrize("to", ["folder", "shards"])
@pytest.mark.parametrize("form", ["embedded", "absolute paths", "relative paths"])
def test_tables_of_datasets_keep_class_names_in_both_forms(tmp_path, form, to):
    """Names in an order of their own, one with a slash; a PNG among the images."""
    root, names = tmp_path / "data", ["wolf", "cat/tabby", "bear"]
    contents = [jpeg(20, 30, seed=1), encoded(noise(20, 30), "PNG"), jpeg(20, 30, seed=2)]
    rows = []
    for number, content in enumerate(contents):
        path = root / "pictures" / f"{number}.img"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        shown = str(path) if form == "absolute paths" else f"pictures/{path.name}"
        rows.append({"bytes": content if form == "embedded" else None, "path": shown})
    for split in ("train", "validation"):
        write_table(root / f"pets_{split}.parquet", rows, [2, 1, 0], names, "img fine_label")
    assert unpack_parquet(root, tmp_path / "out", to=to, workers=1) == {"train": 3, "val": 3}
    source = (list_folder if to == "folder" else list_shards)(tmp_path / "out")
    assert sorted(source.classes) == ["bear", "cat_tabby", "wolf"]
    names = [source.classes[label] for label in source.train.labels]
    by_class = {name: source.train.read(index) for index, name in enumerate(names)}
    assert by_class == {"bear": contents[0], "cat_tabby": contents[1], "wolf": contents[2]}


TWO = [{"bytes": jpeg(20, 30, seed=number), "path": f"{number}.jpg"} for number in range(2)]
WRONG = [
    ("no integers", TWO, [0.0, 1.7], None),
    ("no integers", TWO, ["cat", "dog"], None),
    ("without a label", TWO, [0, None], None),
    ("without a label", TWO, [0, -1], None),
    ("up to 10000000, but only 2", TWO, [0, 10**7], None),
    ("up to 2, but only 2 have a name", TWO, [0, 2], ["a", "b"]),
    ("one name: a_b", TWO, [0, 1], ["a/b", "a:b"]),
    ("two images", TWO[:1] * 2, [0, 0], None),
    ("row 1, .*No such file", [TWO[0], {"bytes": None, "path": "/nowhere/1.jpg"}], [0, 1], None),
    ("row 0, .*not a JPEG or PNG", [{"bytes": None, "path": "train.parquet"}], [0], None),
    ("row 0, .*not a regular file", [{"bytes": None, "path": "/dev/zero"}], [0], None),
]


@pytest.mark.parametrize(("message", "images", "labels", "names"), WRONG)
def test_wrong_tables_are_refused_at_once(tmp_path, message, images, labels, names):
    write_table(tmp_path / "data/train.parquet", images, labels, names)
    with pytest.raises(ConfigError, match=message):
        unpack_parquet(tmp_path / "data", tmp_path / "out", to="folder", workers=1)


def test_incomplete_and_damaged_sets_are_named_and_leave_nothing(tmp_path):
    data = tmp_path / "data"
    first, second = (data / f"train-0000{number}-of-00002.parquet" for number in (0, 1))

    def check(message):
        with pytest.raises(ConfigError, match=message):
            unpack_parquet(tmp_path, tmp_path / "out", to="folder", workers=1)
        assert not (tmp_path / "out").exists()

    check("no files")
    write_parquet(data)
    first.unlink()
    check("1 of 2 train")
    write_parquet(data)
    second.write_bytes(second.read_bytes()[:-100])
    check("train-00001")
