"""The order in which ``auto`` tries backends: rules as data, read from tables of measured records.

A rule holds conditions on named features of a call (:func:`features`) and an order of backends; the first rule whose
conditions hold decides. A winner of :func:`flashsci.tune` for exactly this kind of call comes before all rules. Rules come
from three places, in this order:

- the table of the file that ``FLASHSCI_PREFERENCES`` names, for GPUs of its compute capability;
- the table of the GPU's compute capability (``sm90.json``, ...), or of the nearest of the same major one:
  exceptions that ``tools/choice/preferences.py`` learnt from records of benchmarks;
- ``defaults.json``, written by hand, for every device: it decides the calls that no record decides. It also lists kernels
  that are not timed yet, or slower than others where they are ("untimed"). No rule may choose these; only a request by name gets them.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashsci.call.problem import Problem
from flashsci.choice import tuned

FOLDER = Path(__file__).parent
KINDS = (
    "calls",
    "gradients",
)  # the backend of a call; that of the gradients of a call that cuda or triton computed
#: The backends that ``auto`` may choose.
KNOWN = ("reference", "sdpa", "eager", "triton", "cuda")
TUNED = "tuned"  # in the place of a table's name: times on this machine
BY_HAND = "defaults"
PREDICTED = "predictions"  # in the place of a table's name: times that flashsci/choice/predictions predicts

#: For numbers a rule gives a range, for other features the value or a list of values.
NUMBERS = ("sm", "head_dim", "head_dim_least", "seq_q", "seq_k", "batch_heads", "group", "generation")
WORDS = ("gpu", "bits", "aligned", "band", "lower_right", "bias", "inner_heads", "bias_grad", "bias_summed", "mask", "mask_by_query", "key_weight", "alibi", "dropout", "softcap", "caps_bias", "varlen", "few_scores", "paged", "grad", "forward")  # fmt: skip


def _bias(p: Problem) -> str:
    shape = p.bias_shape
    if p.varlen:
        return "packed" if p.ragged_bias else "none" if shape is None else "keys"
    if shape is None:
        return "none"
    if not shape:
        return "hidden"
    if len(shape) < 2 or shape[-2] == 1:
        return "keys"
    leading = (*(p.batch or ()), p.heads_q)
    own = (*(1,) * (len(leading) + 2 - len(shape)), *shape[:-2])
    return "shared" if math.prod(own) < math.prod(leading) else "pairs"


def features(p: Problem, generation: int = 0, forward: str = "") -> dict[str, Any]:
    """The features that rules can name; None where a compiler hides a size.

    Args:
        generation: that of the cuda backend's kernels that would compute the gradients; 0 where this does not matter.
        forward: the backend that computed the forward, "cuda" or "triton"; "" where this does not matter.

    Returns:
        sm: compute capability, 90 for 9.0. bits: those of the dtype. head_dim, head_dim_least: the larger and the
        smaller of D and Dv. seq_q, seq_k: lengths, for packed sequences their mean. batch_heads: batch times query
        heads. group: query heads for each key head. aligned: D and Dv are multiples of 8. band: "full", "causal" or
        "window". bias: "none"; "keys", equal for all queries; "shared" by some of batch and heads; "pairs", one for
        each; "packed"; "hidden" by a compiler. inner_heads: memory order of the bias. few_scores: as in
        :class:`Problem`. paged: keys are in a paged cache; a rule without this feature is not about such calls. grad:
        a gradient is wanted. The others are as in :class:`Problem`.
    """
    count = None if p.batch is None else math.prod(p.batch)
    lengths = [p.seq_q, p.seq_k]
    if p.varlen:
        lengths = [None if n is None or count is None else n // max(count, 1) for n in lengths]
    unwindowed = p.window_left < 0 and p.window_right <= 0
    return {
        "gpu": p.device_type == "cuda",
        "sm": None if p.capability is None else 10 * p.capability[0] + p.capability[1],
        "bits": 8 * p.dtype.itemsize,
        "head_dim": max(p.head_dim, p.head_dim_v),
        "head_dim_least": min(p.head_dim, p.head_dim_v),
        "aligned": p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0,
        "seq_q": lengths[0],
        "seq_k": lengths[1],
        "batch_heads": None if count is None else count * p.heads_q,
        "group": p.heads_q // p.heads_k,
        "band": "window" if not unwindowed else "causal" if p.window_right == 0 else "full",
        "lower_right": p.lower_right,
        "bias": _bias(p),
        "inner_heads": p.inner_heads,
        "bias_grad": p.bias_grad,
        "bias_summed": p.bias_summed,
        "mask": p.mask,
        "mask_by_query": p.mask_by_query,
        "key_weight": p.key_weight,
        "alibi": p.alibi,
        "dropout": p.dropout_p > 0,
        "softcap": p.softcap > 0,
        "caps_bias": p.caps_bias,
        "varlen": p.varlen,
        "few_scores": p.few_scores,
        "paged": p.paged,
        "grad": p.requires_grad,
        "generation": generation,
        "forward": forward,
    }


@dataclass(frozen=True)
class Rule:
    """The order of backends for the calls whose features meet every condition."""

    when: dict[str, Any]
    order: tuple[str, ...]
    evidence: str
    table: str = BY_HAND  # the name of the table it is in

    def holds(self, found: dict[str, Any]) -> bool:
        # Measurements of dense and packed calls say nothing about paged calls, which other kernels serve.
        if found.get("paged", False) != self.when.get("paged", False):
            return False
        return all(_meets(found[name], wanted) for name, wanted in self.when.items())

    def text(self) -> str:
        """The conditions in words.

        >>> Rule({"bits": 16, "head_dim": [None, 64], "varlen": True, "mask": False}, (), "").text()
        'bits 16, head_dim up to 64, varlen, no mask'
        """
        return ", ".join(_words(name, wanted) for name, wanted in self.when.items()) or "all others"

    def cited(self) -> str:
        """Its evidence, and the place where it is written."""
        if self.table in (TUNED, PREDICTED):
            return self.evidence
        return f"{self.evidence} (preferences/{self.table}.json: {self.text()})"


def _meets(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, list):
        return bool(value == wanted)
    if wanted and isinstance(wanted[0], str):
        return value in wanted
    low, high = wanted
    return value is not None and (low is None or low <= value) and (high is None or value <= high)


def _words(name: str, wanted: Any) -> str:
    if isinstance(wanted, bool):
        return name if wanted else f"no {name}"
    if not isinstance(wanted, list):
        return f"{name} {wanted}"
    if wanted and isinstance(wanted[0], str):
        return f"{name} {' or '.join(wanted)}"
    low, high = wanted
    if low is None:
        return f"{name} up to {high}"
    return f"{name} {low} and more" if high is None else f"{name} {low} to {high}"


@dataclass(frozen=True)
class Table:
    """Rules of one file."""

    name: str
    calls: tuple[Rule, ...]
    gradients: tuple[Rule, ...]
    capability: tuple[int, int] | None = None  # of the GPUs it is for; None: other devices
    about: str = ""  # what was measured
    untimed: tuple[Rule, ...] = ()  # their order: backends that ``auto`` leaves out of such calls
    tiles: tuple[Rule, ...] = ()  # of calls whose mask has a table of its tiles, before those of calls


def read(path: Path) -> Table:
    """A table from its file.

    Raises:
        ValueError: the file is not such a table; the message names the fault.
    """
    try:
        data = json.loads(path.read_text())
        capability = data.get("capability")
        kinds = {
            kind: tuple(
                Rule(dict(rule["when"]), tuple(rule["order"]), rule["evidence"], path.stem)
                for rule in (data[kind] if kind in KINDS else data.get(kind, ()))
            )
            for kind in (*KINDS, "untimed", "tiles")
        }
        table = Table(
            path.stem,
            **kinds,
            capability=capability and tuple(capability),
            about=data.get("about", ""),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no table of preferences ({type(error).__name__}: {error}); "
            "tools/choice/preferences.py writes one from records"
        ) from error
    for rule in (*table.calls, *table.gradients, *table.untimed, *table.tiles):
        _check(path, rule)
    return table


def _check(path: Path, rule: Rule) -> None:
    known = f"auto has {', '.join(KNOWN[:-1])} and {KNOWN[-1]}"
    unknown = set(rule.order) - set(KNOWN)
    if unknown or not rule.order:
        raise ValueError(f"{path}: an order of {list(rule.order)}; {known}")
    for name, wanted in rule.when.items():
        if name not in (*NUMBERS, *WORDS):
            features_are = ", ".join((*NUMBERS, *WORDS))
            raise ValueError(f"{path}: no feature is named {name!r}; there are {features_are}")
        ranged = isinstance(wanted, list) and not isinstance(wanted[0], str)
        if ranged and (name not in NUMBERS or len(wanted) != 2):
            raise ValueError(f"{path}: {name} is no number, or {wanted} no [low, high]")


@functools.lru_cache(maxsize=64)
def tables(capability: tuple[int, int] | None) -> tuple[Table, ...]:
    """The tables for a device, in the order in which they are asked.

    Raises:
        ValueError: the file that FLASHSCI_PREFERENCES names is not a table.
    """
    found = []
    own = os.environ.get("FLASHSCI_PREFERENCES")
    if own:
        table = read(Path(own))
        if table.capability == capability:
            found.append(table)
    if capability is not None:
        name = _nearest(capability)
        if name is not None:
            found.append(read(FOLDER / f"{name}.json"))
    return (*found, read(FOLDER / "defaults.json"))


def _nearest(capability: tuple[int, int]) -> str | None:
    """The name of the table for a compute capability: its own, else the nearest of the same major one, else None."""
    there = {int(path.stem[2:]): path.stem for path in FOLDER.glob("sm*.json")}
    alike = [n for n in there if n // 10 == capability[0]]
    return there[min(alike, key=lambda n: abs(n % 10 - capability[1]))] if alike else None


def find(kind: str, problem: Problem, generation: int = 0, forward: str = "") -> Rule:
    """The rule that decides a call ("calls"), or the backend of its gradients ("gradients")."""
    found = features(problem, generation, forward)
    rule = first(tables(problem.capability), kind, found)
    times = tuned.find(kind, problem, forward)
    if times is None:
        return rule
    winners, evidence = times
    order = tuple(dict.fromkeys((*winners, *rule.order)))
    if not winners:
        evidence = f"{evidence}; {rule.cited()}"
    return replace(rule, when={}, order=order, evidence=evidence, table=TUNED)


def tiled(problem: Problem) -> Rule | None:
    """The rule that decides a call because its mask has a table of tiles; None where the other rules decide."""
    if not problem.mask_tiles:
        return None
    found = features(problem)
    return next((rule for table in tables(problem.capability) for rule in table.tiles if rule.holds(found)), None)


def untimed(problem: Problem) -> set[str]:
    """The backends whose kernels no record times for such a call."""
    return _untimed(tables(problem.capability), features(problem))


def _untimed(asked: Sequence[Table], found: dict[str, Any]) -> set[str]:
    return {n for table in asked for r in table.untimed if r.holds(found) for n in r.order}


def first(asked: Sequence[Table], kind: str, found: dict[str, Any]) -> Rule:
    """The first rule of these tables that holds, without the backends that are untimed for such a call.

    A request for the cuda backend by name gets its gradients, timed or not.
    """
    rule = next(rule for table in asked for rule in getattr(table, kind) if rule.holds(found))
    if found["forward"] == "cuda":
        return rule
    left_out = _untimed(asked, found)
    if left_out.isdisjoint(rule.order):
        return rule
    return replace(rule, order=tuple(name for name in rule.order if name not in left_out))
