"""The story of README and docs/channels_last.md is true: the audit names lines, four edits mend
them.
"""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

import cl_train

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODEL = (DOCS / "my_net.py").read_text(encoding="utf-8")


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
    page = (DOCS / "channels_last.md").read_text(encoding="utf-8")
    diff = page.partition("```diff\n")[2].partition("```")[0]
    mended, changed = MODEL, set()
    for old, new in re.findall(r"^-(.*)\n\+(.*)", diff, flags=re.MULTILINE):
        assert MODEL.count(old) == 1
        mended = mended.replace(old, new)
        changed.add(MODEL.partition(old)[0].count("\n") + 1)
    before, after = audited(MODEL, tmp_path / "my_net.py"), audited(mended, tmp_path / "mended.py")
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
    shown = re.findall(r"my_net\.py:(\d+) `(.*?)[`…]", picture)
    lines = MODEL.splitlines()
    assert len(shown) >= 2
    assert all(lines[int(number) - 1].strip().startswith(line) for number, line in shown)
