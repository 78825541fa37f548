"""Failures of the user's code: the cause and the remedy in one line."""

import re

import pytest
import torch

from cl_train.errors import ConfigError
from cl_train.system.failures import failure_explained


def not_deterministic():
    torch.use_deterministic_algorithms(True)
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def not_contiguous():
    torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last).view(-1)


def unknown():
    raise KeyError("stem")


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (not_deterministic, "net: put_ has no deterministic kernel: use deterministic=false"),
        (not_contiguous, r"net: .*`.*view\(-1\)` needs contiguous memory: use .reshape instead .*"),
        (unknown, "net: KeyError at .*`raise KeyError.*`: 'stem'; mend the model"),
    ],
)
def test_a_known_cause_has_a_remedy_of_its_own(failure, text):
    with pytest.raises(ConfigError) as raised, failure_explained("net", "mend the model"):
        failure()

    assert re.fullmatch(text, str(raised.value))
