"""Classes of two lists are matched by name, never by position. Imports no torch."""

import re
from collections.abc import Sequence

from cl_train.data.images import listed
from cl_train.errors import ConfigError

_KINDS = {"numbers": r"(class_)?\d+", "WordNet ids": r"n\d{8}", "words": r".*"}


def matched(own: Sequence[str], known: Sequence[str]) -> list[int]:
    """Returns the place in `known` of each name of `own`, or -1 if it is not there.

    If no name is in both, lists of equal length name the same classes where one has numbers, or the
    two have different kinds of names: shards have only numbers, published weights words instead of
    WordNet ids.
    """
    place_of = {name: place for place, name in enumerate(known)}
    places = [place_of.get(name, -1) for name in own]
    kinds = {_kind(own), _kind(known)}
    if max(places) < 0 and len(own) == len(known) and ("numbers" in kinds or len(kinds) == 2):
        return [*range(len(own))]
    return places


def matched_all(own: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    """Returns the place in `known` of each name of `own`. Raises ConfigError: `what` lacks some."""
    places = matched(own, known)
    if others := [name for name, place in zip(own, places, strict=True) if place < 0]:
        raise ConfigError(
            f"{what} has {len(known)} classes ({listed(known)}), and not these of the data:"
            f" {listed(others)}; leave them out, or classify without labels: cl-train predict"
        )
    return places


def _kind(names: Sequence[str]) -> str:
    return next(
        kind for kind, form in _KINDS.items() if all(re.fullmatch(form, n, re.S) for n in names)
    )
