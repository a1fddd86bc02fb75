"""The sm90 backward of calls with many tiles, whose rows are prepared and finished among the tiles, run on the host (emulated.py) from the launcher to the
stores, by the judge of every backend."""

from __future__ import annotations

import ctypes as c
import functools
from dataclasses import replace

import pytest

from flashsci.testing import Case, Variant
from tests.cpu.emulator.emulated import build, is_found
from tests.cpu.emulator.test_sm90_kernels import judge

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A function that gives a pass, for the backward of a head dim, built at its first use."""

    @functools.cache
    def find(name: str, dim: int, *changes: tuple[str, str, str]) -> c.CDLL:
        define = f"FLASHSCI_SM90_ONLY={dim}" if name == "backward" else ""
        found = build(tmp_path_factory.mktemp(name), name, *changes, define=define, fast=True)
        found.workspace.restype = c.c_int64
        return found

    return lambda name, dim, *changes: find(name, dim if name == "backward" else 0, *changes)


def case(dim: int, **changes) -> Case:
    """For three multiprocessors, whose bundles have six tiles and more: eight heads of two tiles."""
    variant = dict(lse_grad=True, window=bool(changes.get("causal"))) | changes.pop("variant", {})
    shape = dict(lead=(2,), heads_k=4, seq_q=130, seq_k=200) | changes
    return Case(Variant("bfloat16", dim, dim, **variant), **shape)


CALLS = {
    "bundles": {},
    "bundles of other sizes": dict(lead=(), heads_k=7),
    "one bundle": dict(lead=(), heads_k=3, seq_k=300),
    "causal": dict(causal=True),
    "causal, lower right": dict(causal=True, align="lower_right"),
    "a window": dict(window=(20, 9), variant=dict(window=True)),
    "grouped heads": dict(lead=(3,), heads_k=2, group=2),
    "many rows": dict(seq_q=700, heads_k=3, seq_k=140),
    "a head dim below the tile's": dict(less=24),
    "softcap": dict(softcap=3.0, variant=dict(softcap=True)),
}


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dim", (64, 96, 128))
def test_calls(library, dim, call, deterministic):
    given = dict(CALLS[call])
    judge(library, case(dim - given.pop("less", 0), **given), deterministic, dim=dim)


FAULTS = {
    "rows are not prepared yet": (
        "bwd/load.cuh", "if (a.bundles != 0 && some)", "if (false)"),
    "tiles are not added yet": (
        "bwd/rows.cuh", "wait_count(a.added + bundle, all_added<C>(a, bundle));", ";"),
    "rows that nobody finishes": (
        "bwd/config.cuh", "      work = Work::kFinish;\n      bundle -= 1;\n    } else {", "      work = Work::kNone;\n    } else {"),
    "sums of other rows": (
        "bwd/rows.cuh", "sums + turn * C::kBlockQ", "sums"),
    "K and V of no tile": (
        "bwd/load.cuh", "        ptx::mbarrier_arrive(ptx::shared_address(&shared.kv_full));\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(library, fault):
    def broken(name: str, dim: int) -> c.CDLL:
        return library(name, dim, *([FAULTS[fault]] if name == "backward" else []))

    several, one = case(64, seq_q=400), case(64, lead=(), heads_k=3, seq_k=300)
    given = [several if i % 2 else one for i in range(8)]
    assert is_found(lambda seed: judge(broken, replace(given[seed], seed=seed), dim=64), range(8))
