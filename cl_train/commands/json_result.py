"""The result of a measuring command: as text, in a file, and as JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cl_train.system.files import write_json


def print_result(
    measure: Callable[[], tuple[dict[str, Any], str]], *, out: str | None, as_json: bool
) -> dict[str, Any]:
    """Call `measure`, write its result to the file `out`, and print its text.

    With `as_json` stdout has the JSON only, and everything else is printed to stderr.
    """
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        result, text = measure()
        if out:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            write_json(Path(out), result)
            print(f"written: {out}")
        print(text)
    if as_json:
        print(json.dumps(result))
    return result
