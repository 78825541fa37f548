"""A measured result is printed and written, and is not lost."""

import json
import shutil

import pytest

from cl_train.commands import print_result
from cl_train.config.schema import LoaderBenchmarkSettings as Settings
from cl_train.errors import ConfigError


def measure(settings):
    print("progress")
    return {"speed": 1}, "the text"


def test_text_file_and_json(tmp_path, capsys):
    path = tmp_path / "new" / "result.json"
    assert print_result(Settings, [f"out={path}"], measure) == {"speed": 1}
    assert json.loads(path.read_text()) == {"speed": 1} and "the text" in capsys.readouterr().out
    print_result(Settings, ["json=true"], measure)
    output = capsys.readouterr()
    assert json.loads(output.out) == {"speed": 1} and "the text" in output.err


def test_a_place_that_cannot_be_used_is_refused_before_the_measurement(tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="out="):
        print_result(Settings, [f"out={tmp_path / 'file'}"], measure)
    assert (tmp_path / "file").read_text() == "precious"
    assert not capsys.readouterr().out


def test_the_text_is_printed_although_the_file_cannot_be_written(tmp_path, capsys):
    def measure_and_remove(settings):
        shutil.rmtree(tmp_path / "gone")
        return {}, "the text"

    with pytest.raises(OSError):
        print_result(Settings, [f"out={tmp_path / 'gone' / 'a.json'}"], measure_and_remove)
    assert "the text" in capsys.readouterr().out
