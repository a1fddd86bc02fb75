"""Random programs of calls whose inputs come from each other, as layers' do: gradients, also recorded ones, and second ones.

Generated cases are single calls of tensors that nothing connects. What a call does to one of its inputs it may here do to another,
too, by any way through the program: the same tensor twice, a value computed from a key, a bias from queries, the last call's scores.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import flashsci

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["auto", "triton", *(["cuda"] if DEVICE == "cuda" else [])]
HEADS, ROWS, DIM = 2, 5, 8
KINDS = ("attention", "attention", "lse", "packed", "residual", "sdpa", "merge")
OPTIONS = ("", "", "sink", "key_weight", "causal", "mask", "softcap")
BIASES = ("none", "plane", "shared", "of rows", "of products")
PROGRAMS = 40


class Program:
    """Calls drawn from a seed; the same for every backend and dtype."""

    def __init__(self, seed: int):
        self.seed = seed
        choose = random.Random(seed)
        self.calls = [
            (choose.choice(KINDS), [choose.random() for _ in range(4)], choose.choice(BIASES), choose.choice(OPTIONS), choose.random() < 0.5)
            for _ in range(choose.randint(1, 3))
        ]  # fmt: skip

    def gradients(self, backend: str, dtype: torch.dtype) -> list[Tensor]:
        """Of the leaves: plain, recorded, and of a function of the recorded ones."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = *((1, HEADS, ROWS, DIM),) * 2, (1, HEADS, ROWS, ROWS)
        leaves = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
        with flashsci.use_backend(backend):
            total = self.total(leaves)
        chosen = dict(allow_unused=True, materialize_grads=True)
        plain = torch.autograd.grad(total, leaves, retain_graph=True, **chosen)
        first = torch.autograd.grad(total, leaves, create_graph=True, **chosen)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves, **chosen)
        return [x.detach() for x in (*plain, *first, *second)]

    def total(self, leaves: list[Tensor]) -> Tensor:
        rows, planes = leaves[:2], leaves[2:]
        total = leaves[0].new_zeros(())
        for kind, places, bias_kind, option, added in self.calls:
            q, k, v, plane = (
                of[int(place * len(of))] for of, place in zip((rows, rows, rows, planes), places, strict=True)
            )
            bias = {
                "none": None,
                "plane": plane,
                "shared": plane[:, :1],
                "of rows": plane * q.mean(),
                "of products": q @ k.mT,
            }[bias_kind]
            out, more, scores = call(kind, q, k, v, bias, options_of(option, q, k))
            total = total + more
            rows = [*rows, out + q if added else out]
            planes = planes if scores is None else [*planes, scores]
        return total + sum(x.sin().sum() for x in rows[2:])

    def __repr__(self) -> str:
        return f"Program({self.seed}): {self.calls}"


def options_of(name: str, q: Tensor, k: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sink": q.mean((0, 2, 3)),
        "key_weight": k.mean(-1).sigmoid(),
        "causal": True,
        "softcap": 3.0,
        "mask": torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).tril(),
    }
    return {name: found[name]} if name else {}


def call(
    kind: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, a number from a second result, scores."""
    nothing = q.new_zeros(())
    if kind == "lse":
        out, lse = flashsci.attention(q, k, v, bias=bias, return_lse=True, **options)
        return out, lse.sin().sum(), None
    if kind == "packed":
        edges = torch.tensor([0, 2, ROWS], dtype=torch.int32, device=q.device)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        return flashsci.varlen_attention(*packed, edges).transpose(0, 1)[None], nothing, None
    if kind == "residual":
        out, scores = flashsci.residual_attention(q, k, v, bias)
        return out, scores.cos().mean(), scores
    if kind == "sdpa":
        return flashsci.sdpa(q, k, v, attn_mask=bias), nothing, None
    if kind == "merge":
        halves = [(x[..., ::2, :], x[..., 1::2, :]) for x in (k, v)]
        parts = [flashsci.attention(q, *kv, return_lse=True) for kv in zip(*halves, strict=True)]
        out, lse = flashsci.merge(*zip(*parts, strict=True))
        return out, lse.mean(), None
    return flashsci.attention(q, k, v, bias=bias, **options), nothing, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs(backend):
    served = 0
    for seed in range(PROGRAMS):
        program = Program(seed)
        try:
            found = program.gradients(backend, torch.float32)
        except flashsci.BackendError:  # key weights beside a sink, and the like
            continue
        served += 1
        true = program.gradients("reference", torch.float64)
        names = [f"{order} gradient {i}" for order in ("plain", "recorded", "second") for i in range(3)]
        for name, a, b in zip(names, found, true, strict=True):
            error, size = (a.double() - b).abs().max().item(), max(1.0, b.abs().max().item())
            assert error <= 1e-3 * size, f"{name}: {error:.2g} of {size:.2g}; {program!r}"
    assert served > PROGRAMS // 2
