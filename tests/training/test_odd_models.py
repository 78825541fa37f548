"""Unusual models of a user train, or are refused in one message before the first step."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cl_train.config.command_line import check_command_line
from cl_train.config.schema import ConfigError
from cl_train.training import loop
from cl_train.training.records import describe_failure
from tests.comparison.test_parity import MODELS as COMPARED
from tests.memory_format.test_odd_models import MODELS as AUDITED

MODELS = {f"{kind} {name}": row[0] for kind, rows in (("audited", AUDITED), ("compared", COMPARED))
          for name, row in rows.items()}  # fmt: skip
REMEDIES = {"audited dict": "logits", "audited lazy": "one batch", "audited meta": "meta", "compared view": "reshape",
            "compared sparse gradients": "sparse=False"}  # fmt: skip

chosen: Callable[[], nn.Module] = nn.Identity


def build(num_classes: int) -> nn.Module:
    return chosen()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_or_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "chosen", MODELS[name])
    words = [f"model={__name__}:build", "data=synthetic", "data.image_size=16", "data.synthetic_images=16"]
    words += ["data.synthetic_classes=5", "batch_size=4", "max_steps=2", "device=cpu", "precision=fp32"]
    (cfg,) = check_command_line([*words, "log_to=[]", "channels_last=true"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about sparse, quantised and complex tensors
        try:
            loop.train(cfg, tmp_path)
        except ConfigError as error:
            assert "AssertionError" not in str(error)
            assert REMEDIES.get(name, "") in str(error)
        except Exception as error:
            assert describe_failure(error) is not None
    assert torch.is_grad_enabled()
