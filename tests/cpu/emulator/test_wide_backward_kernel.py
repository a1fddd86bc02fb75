"""The sm90 backward at head dims above 128, whose CTAs work in pairs, run on the host (emulated.py) from the launcher to the stores, by the judge of every backend."""

from __future__ import annotations

import ctypes as c
import functools
from dataclasses import replace

import pytest

from flashsci.testing import Case, Variant
from tests.cpu.emulator.emulated import build, is_found
from tests.cpu.emulator.test_sm90_kernels import judge

pytestmark = [pytest.mark.slow, pytest.mark.every(4)]

#: Padded head dims of q and v: every division of the columns of dQ, and every number of stages.
DIMS = ((256, 256), (192, 192), (192, 128), (128, 256))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A function that gives a pass, for the backward of a pair of head dims, built at its first use."""

    @functools.cache
    def find(name: str, dims: tuple[int, int], *changes: tuple[str, str, str]) -> c.CDLL:
        defines = f"FLASHSCI_SM90_ONLY={dims[0]} FLASHSCI_SM90_ONLY_V={dims[1]}" if name == "backward" else ""
        found = build(tmp_path_factory.mktemp(name), name, *changes, define=defines, fast=True)
        found.workspace.restype = c.c_int64
        return found

    return lambda name, dims, *changes: find(name, dims if name == "backward" else (), *changes)


def case(dims: tuple[int, int], **changes) -> Case:
    """Three tiles of 128 keys, the last of 5 keys: nothing of it belongs to its second CTA."""
    variant = dict(lse_grad=True, window=bool(changes.get("causal"))) | changes.pop("variant", {})
    shape = dict(heads_k=2, seq_q=150, seq_k=261) | changes
    return Case(Variant("bfloat16", *dims, **variant), **shape)


CALLS = {
    "plain": {},
    "causal": dict(causal=True, seq_q=300),
    "narrow": dict(head_dims=(-24, -40)),
    "grouped heads": dict(heads_k=1, group=3, seq_k=130),
    "batches": dict(lead=(2,), seq_q=70, seq_k=64),
    "one query": dict(seq_q=1, seq_k=200),
    "heads": dict(lead=(2,), heads_k=3, seq_q=70, seq_k=200),
    "grouped heads, causal": dict(lead=(2,), heads_k=3, group=2, seq_q=130, seq_k=140, causal=True),
    "softcap": dict(softcap=3.0, variant=dict(softcap=True)),
}


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_calls(library, dims, call, deterministic):
    given = dict(CALLS[call])
    less = given.pop("head_dims", (0, 0))
    wanted = tuple(d + x for d, x in zip(dims, less, strict=True))
    judge(library, case(wanted, **given), deterministic, dim=dims)


FAULTS = {
    "dS sent before it is there": (
        "bwd/mainloop_d256.cuh", "    ptx::barrier_sync(kAllConsumers, 128);\n", ""),
    "dS of the peer is not waited for": (
        "bwd/mainloop_d256.cuh", "    wait_for(shared.peer_ds_full[stage], time);\n", ""),
    "dS written while it is read": (
        "bwd/mainloop_d256.cuh", "    wait_for(shared.ds_empty[ds_stage], index / C::kDsStages + 1);\n", ""),
    "a place that the peer still reads": (
        "bwd/kernel.cuh", "init(shared.ds_empty[i], 4 * C::kConsumers * C::kCtas);", "init(shared.ds_empty[i], 8);"),
    "the other half of the keys": (
        "bwd/load.cuh", "tile.row + (rank ^ 1) * C::kKeys", "tile.row + rank * C::kKeys"),
}  # fmt: skip


# Of one stage of dS: with two, a CTA is hardly ever so far ahead of its peer that it would write what is read.
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(library, fault, dims=(256, 256)):
    def broken(name: str, of: tuple[int, int]) -> c.CDLL:
        return library(name, of, *([FAULTS[fault]] if name == "backward" else []))

    given = case(dims, seq_q=400)
    assert is_found(lambda seed: judge(broken, replace(given, seed=seed), dim=dims), range(6))
