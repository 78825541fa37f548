"""What was removed is answered by its name; files of older runs that do not use it still work."""

import pytest
import yaml

from cl_train.commands import benchmark, prepare_imagenet
from cl_train.config.command_line import check_command_line
from cl_train.errors import ConfigError

REMOVED = """
optim.alpha=0.99
batch_size=auto
compile_mode=reduce-overhead
max_nonfinite=0
amp.init_scale=128
amp.growth_interval=100
amp.min_scale=0.5
checkpoint.every_minutes=10
checkpoint.save_best=false
checkpoint.background=false
data.download=true
augment.policy=timm
augment.timm_policy=v0
augment.randaugment_ops=3
augment.randaugment_magnitude=5
augment.crop_scale_max=0.9
augment.crop_ratio_min=0.5
augment.crop_ratio_max=2
optim.head_lr_ratio=10
layer_scale=1e-4
drop_path_constant=true
experiment=vit_small_deit3
augment.policy=three_augment
rerun=noisy
max_reruns=0
wait_for_quiet_s=0
against=/opt/venv-2.14/bin/python
against=fake
max_differences=0
experiment=resnet18_ffcv_16ep
log_to=mlflow
measure=false
rank_timeout_s=60
ddp_static_graph=true
"""
# What a config.yaml of an older run says without a meaning.
STILL_TRUE = {
    "optim.alpha": 0.9,
    "data.download": False,
    "augment.timm_policy": "rand-m7-mstd0.5-inc1",
    "augment.randaugment_ops": 2,
    "augment.randaugment_magnitude": 9,
    "augment.crop_scale_max": 1.0,
    "augment.crop_ratio_min": 3 / 4,
    "augment.crop_ratio_max": 100.0,
    "amp.init_scale": 65536.0,
    "optim.head_lr_ratio": 1.0,
    "layer_scale": None,
    "drop_path_constant": False,
    "compile_mode": "default",
    "max_nonfinite": 10,
    "rank_timeout_s": 600.0,
    "ddp_static_graph": False,
    "amp.growth_interval": 2000,
    "amp.min_scale": 1.0,
    "rerun": "missing",
    "max_reruns": 2,
    "wait_for_quiet_s": None,
    "checkpoint.every_minutes": 0.0,
    "checkpoint.save_best": True,
    "checkpoint.background": True,
}


@pytest.mark.parametrize("word", REMOVED.split())
def test_what_was_removed_is_answered_by_its_name(word):
    with pytest.raises(ConfigError) as refused:
        check_command_line([word])
    (problem,) = refused.value.problems
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
    for key, value in STILL_TRUE.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    file.write_text(yaml.safe_dump(nested))
    assert [cfg.seed for cfg in check_command_line([f"config={tmp_path}"])] == [7]

    file.write_text(yaml.safe_dump({"optim": {"alpha": 0.5}}))
    with pytest.raises(ConfigError, match=r"config.yaml: optim.alpha was removed"):
        check_command_line([f"config={tmp_path}"])
