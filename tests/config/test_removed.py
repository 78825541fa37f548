"""What was removed is answered by its name; files of older runs that do not use it still work."""

import pytest
import yaml

from cl_train.commands import benchmark, prepare_imagenet
from cl_train.config.command_line import check_command_line
from cl_train.config.removed import ALWAYS
from cl_train.errors import ConfigError

# Of settings that are still there, and of other commands.
VALUES = """
batch_size=auto
augment.policy=timm
augment.policy=three_augment
experiment=vit_small_deit3
experiment=resnet18_ffcv_16ep
log_to=mlflow
against=/opt/venv-2.14/bin/python
against=fake
max_differences=0
"""
REMOVED = [*(f"{key}=1e-9" for key in ALWAYS), *VALUES.split()]


def test_what_was_removed_is_answered_by_its_name():
    with pytest.raises(ConfigError) as refused:
        check_command_line(REMOVED)
    for word, problem in zip(REMOVED, refused.value.problems, strict=True):
        key = word.partition("=")[0]
        assert problem.startswith((f"{key} was removed in ", f"{word} was removed in "))


def test_a_task_that_was_removed_is_answered_too():
    with pytest.raises(ConfigError, match=r"^parquet was removed in 0.3: a Dataset"):
        prepare_imagenet.main(["parquet", "data.root=/datasets/pets"])
    with pytest.raises(ConfigError, match=r"^against=A=1 was removed in 0.3: use train -m env"):
        benchmark.main(["against=A=1"])


def test_a_run_of_an_older_version_can_be_started_again_if_it_did_not_use_what_went(tmp_path):
    file = tmp_path / "config.yaml"
    nested = {"seed": 7}
    # As augment=none had it, too.
    for key, value in (ALWAYS | {"augment.crop_ratio_max": 100.0}).items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    file.write_text(yaml.safe_dump(nested))
    assert [cfg.seed for cfg in check_command_line([f"config={tmp_path}"])] == [7]

    file.write_text(yaml.safe_dump({"optim": {"alpha": 0.5}}))
    with pytest.raises(ConfigError, match=r"config.yaml: optim.alpha was removed"):
        check_command_line([f"config={tmp_path}"])
