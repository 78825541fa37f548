"""The story of README and docs/channels_last.md is true: the audit names lines, four edits mend
them.
"""

import re
from importlib.util import module_from_spec, spec_from_file_location

import torch

import cl_train
from benchmarks.terminal import DOCS, mended


def audited(text, path):
    path.write_text(text, encoding="utf-8")
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build(7)
    cl_train.convert(model)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    return cl_train.audit(model, images)


def test_the_audit_names_the_lines_that_the_four_edits_mend(tmp_path):
    model = (DOCS / "my_net.py").read_text(encoding="utf-8")
    edited = mended(model)
    changed = {
        number
        for number, lines in enumerate(
            zip(model.splitlines(), edited.splitlines(), strict=True), start=1
        )
        if lines[0] != lines[1]
    }
    before, after = (
        audited(text, tmp_path / name)
        for text, name in ((model, "my_net.py"), (edited, "mended.py"))
    )
    named = " ".join([*(str(row["line"]) for row in before.losses()), *before.notes()])
    assert {int(line) for line in re.findall(r"my_net\.py:(\d+)", named)} == changed
    assert len(changed) == 4
    assert len(before.notes()) == 2 and "gradient (of a mean" in before.notes()[0]
    assert "in 6 modules; 6 calls pay" in before.notes()[0], "one line, once"
    text = str(before)
    assert text.index("| calls") < text.index("its backward pass"), "the table comes first"
    assert after.totals["lost"] == 0 and not after.notes()


def test_the_terminal_shows_the_lines_of_the_model():
    picture = (DOCS / "terminal.svg").read_text(encoding="utf-8")
    model = (DOCS / "my_net.py").read_text(encoding="utf-8").splitlines()
    shown = re.findall(r"my_net\.py:(\d+) `(.*?)[`…]", picture)
    assert len(shown) >= 2
    assert all(model[int(number) - 1].strip().startswith(line) for number, line in shown)
