"""The kind of a call in words, and whether records of such kinds stand behind a prediction.

Sizes, bands and grouped heads may lie beyond those of records, because work says what they cost. Other features may
not: a constant says nothing of a part of a kernel that no record ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashsci.call.problem import Problem
from flashsci.choice.preferences import features

#: Features (flashsci/choice/preferences) of which each value must have been seen.
NAMED = ("aligned", "bias", "inner_heads", "bias_grad", "mask", "mask_by_query", "key_weight", "dropout", "softcap")
#: Properties of a Problem of which each value must have been seen.
OTHERS = ("alibi", "caps_bias", "sink", "deterministic", "mask_tiles", "return_lse")
#: Head dims between the least and the largest that were seen.
RANGE = "head_dim"


def words(p: Problem) -> dict[str, Any]:
    """The features of a call on which its kernels branch."""
    found = features(p)
    others = {name: bool(getattr(p, name)) for name in OTHERS}
    return {name: found[name] for name in (*NAMED, RANGE)} | others | {"precision": p.precision}


def collected(kinds: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each word in some calls: all of them, of head dims the least and the largest."""
    values = {name: sorted({kind[name] for kind in kinds}) for name in kinds[0]}
    return {name: [v[0], v[-1]] if name == RANGE else v for name, v in values.items()}


def unseen(seen: Mapping[str, Sequence[Any]], kind: Mapping[str, Any]) -> list[str]:
    """The words of a call that are not among those seen."""
    low, high = seen[RANGE]
    found = [name for name, value in kind.items() if name != RANGE and value not in seen[name]]
    return found if low <= kind[RANGE] <= high else [*found, RANGE]
