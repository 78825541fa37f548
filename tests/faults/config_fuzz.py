"""Every setting with wrong values, every key with one typing error. In process and without torch."""

import random
import string
from collections.abc import Iterator

from bench import Bench
from outcome import Outcome

from cl_train.config.command_line import GROUPS, check_command_line
from cl_train.config.schema import CHOSEN_BY_GROUP, Config, ConfigError
from cl_train.config.validation import Setting, setting_fields

MAX_LINES = 24  # one screen


def wrong_values(item: Setting) -> Iterator[str]:
    """Values that the setting cannot take, by its declared type and range."""
    metadata, base = item.metadata, item.base_type.__name__
    if item.list_depth:
        yield from ("[a,b,c]", "[[1]]", "{a:1}") if base == "float" else ()
        return
    if base in ("int", "float"):
        yield from ("many", "[1,2]", "nan", "inf", "''", "true", "{a:1}")
        for name, outside in (("minimum", -1), ("above", 0), ("maximum", 1)):
            if metadata[name] is not None:
                yield str(metadata[name] + outside * (1 if base == "int" else 0.5))
    if base == "int":
        yield from ("1.5", "x" * 300)
    if base == "bool":
        yield from ("maybe", "3", "[true]", "''")
    if base == "str" and metadata["choices"]:
        yield from ("nonsense", "3", "[a]", "''", metadata["choices"][-1] + "x")
    if not item.optional:
        yield "null"


def wrong_setting_values(bench: Bench, limit: int | None) -> Outcome:
    """Each wrong value: a ConfigError that names the setting, at most one screen, no other exception."""
    settings = {key: item for key, item in setting_fields(Config).items() if key not in CHOSEN_BY_GROUP}
    cases = [(key, value) for key, item in settings.items() for value in wrong_values(item)]
    random.Random(bench.seed).shuffle(cases)
    with Outcome("a setting with a wrong value", bench.seed) as outcome:
        for key, value in cases[:limit]:
            outcome.check(problem_of([f"{key}={value}"], key))
        for word in HOSTILE_WORDS:
            outcome.check(problem_of([word], ""))
    return outcome


HOSTILE_WORDS = (
    "+model._target_=os.system", "++optim._target_=os.system", "model._target_=os.system",
    "+optim={_target_:os.system,command:id}", "optim={_target_:os.system}", "=3", "epochs", "epochs=", "~epochs",
    "epochs=1,2", "data=nonsense", "experiment=../../etc/passwd", "data=/etc/passwd",
    "batch_size=${oc.env:NO_SUCH_VARIABLE}", "batch_size=${nonsense}", "batch_size=${batch_size}", "epochs={",
    "\x00=1", "epochs=\u0661\u0662", "é=1", "a" * 5000 + "=1", "--epochs=3", "--config-name=nothing",
)  # fmt: skip


def problem_of(words: list[str], must_name: str) -> str:
    """`` where the command line is refused as it should be."""
    shown = " ".join(words)[:80]
    try:
        check_command_line(words)
    except ConfigError as error:
        text = "\n".join(error.problems)
        if must_name and must_name not in text:
            return f"{shown}: the message does not name {must_name}: {text[:200]}"
        if text.count("\n") + 1 > MAX_LINES or len(text) > 3000 + 2 * len(shown) + len(" ".join(words)):
            return f"{shown}: a message of {len(text)} characters"
        return "" if text.strip() else f"{shown}: an empty message"
    except SystemExit as error:  # argparse, for words that begin with --
        return "" if error.code == 2 else f"{shown}: exit code {error.code}"
    except BaseException as error:
        return f"{shown}: {type(error).__name__}: {str(error)[:200]}"
    return f"{shown}: accepted"


# --- typing errors ----------------------------------------------------------------------------------------------------


def one_edit(word: str, rng: random.Random) -> str:
    """A letter left out, doubled, swapped with its neighbour, replaced or added."""
    while True:
        place, kind = rng.randrange(len(word)), rng.randrange(5)
        letter = rng.choice(string.ascii_lowercase + "_")
        edited = {
            0: word[:place] + word[place + 1 :],
            1: word[:place] + word[place] + word[place:],
            2: word[:place] + word[place : place + 2][::-1] + word[place + 2 :],
            3: word[:place] + letter + word[place + 1 :],
            4: word[:place] + letter + word[place:],
        }[kind]
        if edited != word and edited and not edited.startswith((".", "-")) and ".." not in edited:
            return edited


def misspelt_settings(bench: Bench, per_key: int) -> Outcome:
    """A try is one misspelt key of a setting or group; it survives where the right one is among the suggestions."""
    rng = random.Random(bench.seed)
    known = {*setting_fields(Config), *GROUPS}
    with Outcome("a key with one typing error gets the right suggestion", bench.seed) as outcome:
        for key in sorted(known):
            for _ in range(per_key):
                edited = one_edit(key, rng)
                if edited not in known:
                    outcome.check(problem_of_suggestion(edited, key))
    outcome.counts["right suggestions, per mille"] = 1000 * outcome.survived // outcome.tried
    return outcome


def problem_of_suggestion(edited: str, key: str) -> str:
    try:
        check_command_line([f"{edited}=1"])
    except ConfigError as error:
        text = error.problems[0]
        suggested = text.partition("did you mean ")[2].rstrip("?").split(", ")
        return "" if key in suggested else f"{edited} instead of {key}: {text}"
    except BaseException as error:
        return f"{edited}: {type(error).__name__}: {str(error)[:100]}"
    return f"{edited}: accepted"
