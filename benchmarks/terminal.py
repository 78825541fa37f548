"""Record docs/terminal.svg from real commands: audit a model, mend it, see the gain.

    python -m benchmarks.terminal

The model is docs/my_net.py, its edits the diff in docs/channels_last.md. Of what a command prints
the picture has the lines that `STEPS` names, cut at its right side.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
WITH = "data.image_size=128 batch_size=16 precision=fp32"
GAIN = "cl-train benchmark model=my_net:build,mended:build compare_by=model channels_last=true"
# With a pattern of the lines that are shown.
STEPS = (
    (f"cl-train audit model=my_net:build {WITH}", r".* loses |\| calls|\| \d|- my_net"),
    ("diff my_net.py mended.py", "[<>] "),
    (f"cl-train audit model=mended:build {WITH}", ".* no operator loses "),
    (f"{GAIN} {WITH}", r" *(right|faster|because|do):"),
)
COLUMNS = (0, 2, 5)  # of the table of losses
WIDTH, LINE_PX = 114, 18  # characters; pixels between lines
STYLE = """<style>
text { font: 13px ui-monospace, Menlo, Consolas, monospace; white-space: pre;
  animation: show 0s both }
@keyframes show { from { opacity: 0.4 } }
@media (prefers-reduced-motion) { text { animation: none } }
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>"""
# Of lines that begin so.
COLOURS = {"$": "#79c0ff", "    ": "#79c0ff", ">": "#7ee787", "<": "#ff7b72", "  faster": "#7ee787"}


def mended(model: str) -> str:
    """The text of the model with the edits of docs/channels_last.md."""
    page = (DOCS / "channels_last.md").read_text(encoding="utf-8")
    diff = page.partition("```diff\n")[2].partition("```")[0]
    for before, after in re.findall(r"^-(.*)\n\+(.*)", diff, flags=re.MULTILINE):
        assert model.count(before) == 1, before
        model = model.replace(before, after)
    return model


def recorded() -> list[str]:
    """The commands, with the lines of their output that are shown."""
    lines = []
    model = (DOCS / "my_net.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("my_net.py", model), ("mended.py", mended(model))):
            (Path(folder) / name).write_text(text, encoding="utf-8")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PYTHONPATH": folder, "PATH": path}
        for command, shown in STEPS:
            words = shlex.split(command)
            done = subprocess.run(
                words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
            )
            output = [line for line in done.stdout.splitlines() if re.match(shown, line)]
            typed = textwrap.wrap(f"$ {command}", WIDTH - 2, subsequent_indent="    ")
            lines += ["", *" \\\n".join(typed).splitlines(), *map(narrowed, output)]
    return lines[1:]


def narrowed(line: str) -> str:
    """A row of a table with `COLUMNS` only; another line as it is."""
    cells = line.split(" | ")
    return " | ".join(cells[i] for i in COLUMNS) if line.startswith("| ") else line


def drawn(lines: list[str]) -> str:
    """The lines as SVG; each lights up a quarter of a second after the one before."""
    texts = []
    for number, line in enumerate(lines):
        short = line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
        colours = [COLOURS[start] for start in COLOURS if line.startswith(start)]
        fill = next(iter(colours), "#e6edf3")
        place = f'x="12" y="{LINE_PX * (number + 1.5):g}" fill="{fill}"'
        delay = f'style="animation-delay: {number / 4:g}s"'
        texts.append(f"<text {place} {delay}>{escape(short)}</text>")
    box = f"0 0 {WIDTH * 7.9 + 24:.0f} {LINE_PX * (len(lines) + 1)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">'
    return "\n".join([head, STYLE, *texts, "</svg>\n"])


if __name__ == "__main__":
    (DOCS / "terminal.svg").write_text(drawn(recorded()), encoding="utf-8")
