"""Fails unless docs/architecture.md lists the private names of torch that the program touches, and
no others.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRIVATE = re.compile(r"\b_[a-zA-Z]\w*")
OF_PYTHON = {"_exit", "_getframe", "_run_exitfuncs", "_fields"}
touched: set[str] = set()
for path in [*ROOT.glob("cl_train/**/*.py"), *ROOT.glob("benchmarks/*.py")]:
    own, used = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self"), name):
                own.add(name)
            case ast.Attribute(attr=name) | ast.Call(
                ast.Name("getattr"), [_, ast.Constant(str(name)), *_]
            ):
                used.add(name)
            case ast.ImportFrom(module=str(module), names=names):
                used |= {*module.split("."), *(alias.name for alias in names)}
    touched |= set(filter(PRIVATE.fullmatch, used - own - OF_PYTHON))

text = (ROOT / "docs/architecture.md").read_text().partition("**Private names of torch**")[2]
listed = set(PRIVATE.findall(text.partition("| names |")[2].partition("\n\n")[0]))
print(f"{len(touched)} private names of torch: {', '.join(sorted(touched))}")
if touched != listed:
    more, less = sorted(touched - listed), sorted(listed - touched)
    sys.exit(f"docs/architecture.md: not listed: {more}; not touched: {less}")
