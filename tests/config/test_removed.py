"""What was removed is answered by its name; files of older runs that do not use it still work."""

import pytest
import yaml

from cl_train.commands import benchmark
from cl_train.config.command_line import check_command_line
from cl_train.config.removed import ALWAYS
from cl_train.errors import ConfigError


def test_what_was_removed_is_answered_by_its_name():
    with pytest.raises(ConfigError) as refused:
        check_command_line([f"{key}=1e-9" for key in ALWAYS])
    for key, problem in zip(ALWAYS, refused.value.problems, strict=True):
        assert problem.startswith(f"{key} was removed in 0.3: ")
    with pytest.raises(ConfigError, match=r"^against was removed in 0.3: train -m environment="):
        benchmark.main(["against=A=1"])


def test_a_run_of_an_older_version_can_be_started_again_if_it_did_not_use_what_went(tmp_path):
    file = tmp_path / "config.yaml"
    nested = {"seed": 7}
    for key, value in ALWAYS.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    file.write_text(yaml.safe_dump(nested))
    assert [cfg.seed for cfg in check_command_line([f"config={tmp_path}"])] == [7]

    file.write_text(yaml.safe_dump({"optim": {"alpha": 0.5}}))
    with pytest.raises(ConfigError, match=r"config.yaml: optim.alpha was removed"):
        check_command_line([f"config={tmp_path}"])
