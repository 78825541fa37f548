"""The exceptions of the public functions, and their page."""

import re
from pathlib import Path

import pytest

import cl_train

PAGE = Path("docs/python.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.partition("## Errors")[2], flags=re.M)


@pytest.mark.parametrize(("name", "base"), ROWS)
def test_the_tree_is_as_documented(name, base):
    exception = getattr(cl_train.errors, name)
    assert exception.__base__.__name__ == base and f"  {name} " in str(cl_train.errors.__doc__)


def test_every_exception_is_documented():
    defined = [name for name, item in vars(cl_train.errors).items() if isinstance(item, type)]
    assert sorted(name for name in defined if name != "Sequence") == sorted(n for n, _ in ROWS)


def test_the_modules_raise_those_of_the_tree():
    from cl_train.errors import TrainingFault, WorkerError

    assert cl_train.TrainingFault is TrainingFault and cl_train.errors.WorkerError is WorkerError


@pytest.mark.parametrize("function", [cl_train.train, cl_train.load_model])
def test_what_is_no_text_is_refused(function):
    with pytest.raises(cl_train.ConfigError, match=r"\(3\): "):
        function(3)
