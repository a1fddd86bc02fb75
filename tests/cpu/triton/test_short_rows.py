"""Rows of few keys, interpreted: rows of many heads share a tile, and never meet in it."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs, poisoned_memory

pytest.importorskip("triton")

from flashsci.backends.triton import tilings
from flashsci.backends.triton.plans.dense import DensePlan, ForwardLaunches, plan
from flashsci.call import row_pitch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets without a GPU only; there, run the check"
)

PAIR = {"bias": "pair", "bias_grad": True}
KEY = {"bias": "key", "bias_grad": True}


def case(dims, seq_q, seq_k, variant=None, **fields):
    kind = {"lse_grad": True, "head_dim": dims[0], "head_dim_v": dims[1]} | (variant or {})
    given = {"lead": (3,), "heads_k": 2, "group": 1, "seed": 5, "seq_q": seq_q, "seq_k": seq_k} | fields
    return Case(variant=Variant(**kind), **given)


CASES = {
    "one row": case((16, 16), 1, 1),
    "one query, few keys": case((64, 40), 1, 7, group=4, layout="bshd"),
    "many queries, few keys": case((32, 32), 33, 5, layout="bshd"),
    "unaligned rows": case((41, 23), 3, 3),
    "wide heads": case((200, 256), 2, 3),
    "16 bits": case((80, 80), 6, 6, {"dtype": "bfloat16"}, group=2),
    "causal, lower right": case((16, 32), 3, 16, {"window": True}, causal=True, align="lower_right"),
    "window that hides rows": case((16, 16), 12, 4, {"window": True}, window=(1, 0)),
    "negative scale, softcap": case((16, 16), 4, 4, {"softcap": True, "flipped": True}, scale=-0.4, softcap=1.5),
    "bias of every score": case((16, 16), 9, 9, PAIR, bias_shape=(3, 2, 9, 9), bias_holes=True),
    "shared bias": case((32, 16), 5, 7, PAIR, bias_shape=(1, 2, 5, 7), group=2, heads_k=1),
    "bias of keys": case((32, 16), 5, 7, KEY, bias_shape=(3, 1, 1, 7), group=2),
    "bias of queries": case((16, 16), 5, 7, PAIR, bias_shape=(3, 2, 5, 1)),
    "softcap of a bias": case((16, 16), 4, 6, {**PAIR, "softcap": True, "caps_bias": True}, softcap=2.0, bias_shape=(3, 2, 4, 6)),
    "mask": case((16, 16), 6, 11, {"mask": True}, mask_shape=(3, 1, 6, 11), mask_kind="rows", group=2),
    "mask of keys": case((24, 24), 2, 16, {"mask": True}, mask_shape=(3, 1, 1, 16), mask_kind="keys"),
    "ALiBi": case((16, 16), 3, 8, {"alibi": True}, align="lower_right", group=2),
    "two batch dims": case((16, 16), 4, 4, rank=5, lead=(2, 3), layout="bshd"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers(name, monkeypatch):
    plan.cache_clear()
    served = set()
    honest = DensePlan.short_rows
    spy = lambda self, kernel, *a, **k: served.add(kernel.__name__) or honest(self, kernel, *a, **k)  # noqa: E731
    monkeypatch.setattr(DensePlan, "short_rows", spy)
    judge = Judge(make_inputs(CASES[name]))
    with poisoned_memory():
        judge.require(evaluate(judge.inputs, "triton"))
    plan.cache_clear()
    assert served == {"short_forward_kernel", "short_delta_kernel", "short_dq_kernel", "short_dkdv_kernel"}


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf))
@pytest.mark.parametrize("of", "qkv")
def test_a_member_that_is_not_finite_stays_alone(wrong, of):
    x = {name: torch.randn(5, 2, 3, 16, requires_grad=True) for name in "qkv"}
    with torch.no_grad():
        x[of][2, 1, 0, 3] = wrong
    out, lse = flashsci.attention(**x, return_lse=True, backend="triton")
    found = (out, lse, *torch.autograd.grad((out.sin().sum(), lse.sum()), tuple(x.values())))
    others = torch.ones(5, 2, dtype=torch.bool)
    others[2, 1] = False
    for result in found:
        assert torch.isfinite(result[others]).all()


def test_calls_with_few_products_for_their_bytes_are_short():
    def short(rows, keys, dim=64, group=1):
        return tilings.is_short((dim, dim), rows, keys, group)

    assert short(1, 1) and short(1, 16) and short(16, 16) and short(4096, 8) and short(8, 16, 256)
    assert not short(1, 17) and not short(17, 16) and not short(4096, 9) and not short(4, 16, 64, 8)
    assert not short(2, 2, 257)


def test_other_features_have_the_kernels_of_tiles(monkeypatch):
    monkeypatch.setattr(DensePlan, "short_rows", None)
    q = torch.randn(2, 2, 3, 16)
    for options in ({"key_weight": torch.rand(2, 2, 3)}, {"dropout_p": 0.3}):
        flashsci.attention(q, q, q, backend="triton", **options)


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("layout", ("heads outside", "heads inside"))
def test_bias_and_mask_are_read_where_they_are(monkeypatch, layout, grad):
    for name in ("FEWEST_SCORES", "FEWEST_NARROW_SCORES"):
        monkeypatch.setattr(row_pitch, name, 1)
    read, honest = [], ForwardLaunches.__call__
    spy = lambda self, x: read.append((x[3].data_ptr(), x[5].data_ptr())) or honest(self, x)  # noqa: E731
    monkeypatch.setattr(ForwardLaunches, "__call__", spy)
    q = torch.randn(3, 8, 5, 16, dtype=torch.bfloat16)
    mask = torch.rand(3, 1, 5, 5) > 0.3
    bias = torch.randn(3, 8, 5, 5, dtype=torch.bfloat16)
    if layout == "heads inside":
        bias = bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    bias.requires_grad_(grad)
    found = [flashsci.attention(q, q, q, bias=bias, mask=mask, backend=b) for b in ("triton", "reference")]
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
    assert read == [(bias.data_ptr(), mask.data_ptr())]


def test_batch_members_count_for_nothing():
    """The kernel of a call does not depend on the size of the batch."""
    q = torch.randn(7, 2, 3, 16)
    whole = flashsci.attention(q, q, q, backend="triton", precision="ieee")
    for n in range(7):
        one = flashsci.attention(q[n : n + 1], q[n : n + 1], q[n : n + 1], backend="triton", precision="ieee")
        assert torch.equal(one, whole[n : n + 1])
