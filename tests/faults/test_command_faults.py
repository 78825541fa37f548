"""Wrong settings and words, odd folders and environments."""

from pathlib import Path

import pytest

from cl_train.config.command_line import check_command_line
from cl_train.config.fields import setting_fields
from cl_train.config.schema import CHOSEN_BY_GROUP, Config
from cl_train.config.validation import show
from cl_train.errors import ConfigError
from tests.faults import plants
from tests.faults.bench import mounted

pytestmark = pytest.mark.slow
WORDS = (
    "++optim._target_=os.system", "model._target_=os.system", "optim={_target_:os.system}", "=3",
    "epochs", "epochs=", "data=nonsense", "experiment=../../etc/passwd", "data=/etc/passwd",
    "batch_size=${nonsense}", "batch_size=${batch_size}", "epochs={", "\x00=1", "\u00e9=1",
    "epochs=\u0661\u0662", "a" * 5000 + "=1", "--config-name=nothing",
)  # fmt: skip


def wrong_values(item):
    """Values that the setting cannot take, by its declared type and range."""
    metadata, base = item.metadata, item.base_type
    if item.list_depth:
        yield from ("[a,b,c]", "[[1]]", "{a:1}") if base is float else ()
        return
    if base in (int, float):
        yield from ("many", "[1,2]", "nan", "inf", "''", "true", "{a:1}")
        outside = {">=": -1, ">": 0, "<=": 1}
        for sign, limit in item.bounds:
            yield show(limit + outside[sign] * max(1, abs(limit)))
    if base is int:
        yield "1.5"
    if base is bool:
        yield from ("maybe", "3", "[true]", "''")
    if base is str and metadata["choices"]:
        yield from ("nonsense", "3", "[a]", "''")
    if not item.optional:
        yield "null"


def test_wrong_setting_values(bench):
    """A setting with a wrong value is refused by name, in one screen, and so are odd words."""
    settings = setting_fields(Config).items()
    cases = [
        (f"{key}={value}", key)
        for key, item in settings
        for value in wrong_values(item)
        if key not in CHOSEN_BY_GROUP
    ]
    bench.random.shuffle(cases)
    for word, name in [*cases[: bench.count(15, None)], *((word, "") for word in WORDS)]:
        with bench.attempt():
            with pytest.raises(ConfigError, match=name or None) as caught:
                check_command_line([word])
                pytest.fail(f"{word[:80]}: accepted")
            text = str(caught.value)
            assert text.strip() and text.count("\n") < 24, f"{word[:80]}: {text[:200]}"


def test_odd_folders_and_environments(bench):
    """Odd folders and environments: success, or one message and exit code 2; never a traceback."""
    here = bench.folder / "odd"
    here.mkdir()
    (here / "file").write_text("")
    rows = [
        (here / "with space and = sign", 0, "", {}),
        (here / "\u00fcn\u00ef \u2603", 0, "", {"LANG": "C", "LC_ALL": "C", "TERM": ""}),
        (here / "file/run", 2, "cannot write|Not a directory", {}),
        (Path("/proc/nowhere"), 2, "cannot write|No such file", {}),
        (here / "clock", 0, "", {}),
        (here / "home", 0, "", {"HOME": "/nonexistent", "COLUMNS": "0"}),
        (here / "secret", 0, "", {"API_TOKEN": "s3cr3t-value"}),
    ]
    for run, code, said, environment in rows:
        with bench.attempt():
            hooks = (plants.clock_jumps_back,) if run.name == "clock" else ()
            bench.run(run, *hooks, code=code, said=said, environment=environment)
            for path in filter(Path.is_file, run.rglob("*")):
                assert b"s3cr3t-value" not in path.read_bytes(), f"{path.name} holds a secret"
    for name, options, codes in (  # real file systems
        ("full", "size=64k", (1, 2)),
        ("no-inodes", "size=8m,nr_inodes=2", (2,)),
        ("read-only", "size=8m,ro", (2,)),
    ):
        (here / name).mkdir()
        with mounted(here / name, options) as is_mounted:
            if is_mounted:
                running = bench.start(here / name / "run", plants.short_retries)
                with bench.attempt():
                    code, output = running.wait(), running.output()
                    assert code in codes and "Traceback" not in output, (name, output)
