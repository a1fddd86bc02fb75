"""A check of every candidate of a drawn call, before it is timed: a sample of its results, by the judge of the tests.

As in tools/bench/verify.py, dout is zero outside the sample, so that every gradient, also one that is a sum over
everything, is exactly that of the sample. ALiBi and dropout depend on positions: a sample of theirs has rows that are
neighbours, and with dropout also the first members and heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from flashsci.testing import Finding, Inputs, Judge
from tools.bench.drawn import ways
from tools.bench.drawn.work import Results, Work, without_dropout
from tools.bench.verify import grid, pick, spread

#: Scores, or elements of keys and values, that the oracle holds at once, by device type.
BUDGET = {"cuda": 1 << 21, "cpu": 1 << 15}
#: Packed sequences of a sample, at most: the oracle takes them one by one.
SEQUENCES = 6
Index = tuple[Tensor, ...]


class Sample:
    """Part of a drawn call with its oracle; judges the results of any number of candidates."""

    def __init__(self, work: Work):
        self.work = work
        self.budget = BUDGET[work.device.type]
        self.call, self.indices = (self._packed if work.call.lens else self._dense)()
        leaves = work.leaves
        self.dout: Tensor | None = None
        if leaves:
            dout = torch.zeros_like(work.inputs.dout)
            where = grid(dout, self.indices["out"])
            dout[where] = work.inputs.dout.detach()[where]
            self.dout = dout.requires_grad_() if work.call.work == "second" else dout

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.call)

    @cached_property
    def undropped(self) -> Judge:
        """The judge of candidates that draw another dropout: they are checked without."""
        return Judge(without_dropout(self.call))

    @cached_property
    def coarse(self) -> Judge:
        """The judge of SDPA, which takes a bias in q's dtype: that rounding is no error of its own."""
        call, dtype = without_dropout(self.call), self.call.q.dtype
        constant = ways.as_bias(call) if call.cu_seqlens_q is None else None
        bias = call.bias if constant is None else constant
        if bias is not None:
            call = replace(call, bias=bias.to(dtype), key_weight=None, alibi_slopes=None)
        return Judge(call)

    @cached_property
    def plain(self) -> Judge:
        """The judge of plain PyTorch, whose scores are rounded to the dtype of the inputs."""
        return Judge(without_dropout(self.call), fused=False)

    def judges(self, name: str) -> Iterator[Judge]:
        """The judges of a candidate: it is right if one of them finds no fault."""
        if name in ways.OURS:
            yield self.judge
            return
        rounded = self.call.q.dtype != torch.float32
        bias = self.call.bias
        of_float = bias is not None and bias.dtype == torch.float32
        if rounded and name != "math" and (of_float or self.work.call.alibi or self.work.call.key_weight):
            yield self.coarse
            return
        yield self.judge if self.call.dropout_seed is None else self.undropped
        if rounded and name in ways.HOLDING:
            yield self.plain

    def problem(self, name: str, results: Results) -> str | None:
        """The faults of the results of a candidate; None if there are none."""
        for tensor, x in results.items():
            if not torch.isfinite(x).all():
                return f"{tensor} is not finite"
        faults: str | None = None
        for judge in self.judges(name):
            found: list[Finding] = []
            for tensor, x in results.items():
                part = pick(x, self.indices[_slot(tensor)])
                found.append(judge.judge(tensor, part.to(judge.baseline[tensor].dtype)))
            problem = "; ".join(f.problem for f in found if f.problem)
            if not problem:
                return None
            faults = faults or problem
        return faults

    def _dense(self) -> tuple[Inputs, dict[str, Index]]:
        x, call, device = self.work.inputs, self.work.call, self.work.device
        room = max(1, self.budget // call.seq_k)
        dropped, positions = x.dropout_seed is not None, x.alibi_slopes is not None
        rows = self._rows(min(call.seq_q, room), dropped or positions)
        each = max(len(rows) * (call.heads // call.heads_k), call.dim + call.dim_v)
        room = max(1, self.budget // (call.seq_k * each))
        choose = _first if dropped else spread
        heads_k = choose(call.heads_k, room, device)
        batch = choose(1 if dropped else call.batch, max(1, room // len(heads_k)), device)
        group = torch.arange(call.heads // call.heads_k, device=device)
        heads = (heads_k[:, None] * (call.heads // call.heads_k) + group).flatten()
        keys, dim, dim_v = (torch.arange(n, device=device) for n in (call.seq_k, call.dim, call.dim_v))
        indices = {
            "q": (batch, heads, rows, dim),
            "k": (batch, heads_k, keys, dim),
            "v": (batch, heads_k, keys, dim_v),
            "out": (batch, heads, rows, dim_v),
            "sink": (heads,),
        }
        scores = (batch, heads, rows, keys)
        of_bias = scores if x.bias is None else scores[4 - x.bias.dim() :]
        indices["bias"] = of_bias
        mask = None if x.mask is None else pick(x.mask, scores[4 - x.mask.dim() :])
        seen = ways.visible(x)
        if seen is not None:
            mask = seen[rows] if mask is None else mask & seen[rows]
        learns = x.dout is not None
        options = {**x.options, "causal": False, "window": None}
        if positions and not dropped:  # the last rows of the call, or the first
            options["align"] = "lower_right" if self._from_the_end() else "upper_left"
        tangents = {n: pick(t, indices[n[1:]]) for n, t in x.tangents.items()}
        picked = Inputs(
            *(pick(getattr(x, n), indices[n]) for n in "qkv"),
            bias=None if x.bias is None else pick(x.bias, of_bias),
            mask=mask,
            dout=pick(x.dout, indices["out"]) if learns else None,
            dropout_seed=x.dropout_seed,
            key_weight=None if x.key_weight is None else pick(x.key_weight, (batch, heads_k, keys)),
            alibi_slopes=None if x.alibi_slopes is None else x.alibi_slopes[heads],
            sink=None if x.sink is None else x.sink.detach()[heads],
            bias_grad=x.bias_grad,
            key_weight_grad=False,
            options=options,
            tangents=tangents,
        )
        return picked, indices

    def _from_the_end(self) -> bool:
        call = self.work.call
        return call.align == "lower_right" or call.seq_q == call.seq_k

    def _rows(self, count: int, neighbours: bool) -> Tensor:
        """Query rows of a dense call: anywhere, or neighbours at an end."""
        call, device = self.work.call, self.work.device
        if not neighbours:
            return spread(call.seq_q, count, device)
        last = self.work.inputs.dropout_seed is None and self._from_the_end()
        return torch.arange(count, device=device) + (call.seq_q - count if last else 0)

    def _packed(self) -> tuple[Inputs, dict[str, Index]]:
        """Whole sequences, or some heads of a long one; with dropout the first ones."""
        x, call, device = self.work.inputs, self.work.call, self.work.device
        squares = [call.heads * n * max(n, call.dim + call.dim_v) for n in call.lens]
        count = max(1, self.budget * len(squares) // sum(squares))
        choose = _first if x.dropout_seed is not None else spread
        chosen = choose(len(squares), min(count, SEQUENCES), torch.device("cpu")).tolist()
        while len(chosen) > 1 and sum(squares[n] for n in chosen) > self.budget:
            chosen = chosen[:-1]
        lens = torch.tensor(call.lens)
        starts, blocks = lens.cumsum(0) - lens, (lens * lens).cumsum(0) - lens * lens

        def ranges(first: Tensor, size: Tensor) -> Tensor:
            parts = [torch.arange(int(size[n])) + first[n] for n in chosen]
            return torch.cat(parts).to(device)

        tokens = ranges(starts, lens)
        dim, dim_v = (torch.arange(n, device=device) for n in (call.dim, call.dim_v))
        room = max(1, self.budget * call.heads_k // squares[chosen[0]]) if len(chosen) == 1 else call.heads_k
        heads_k = choose(call.heads_k, min(room, call.heads_k), device)
        group = torch.arange(call.heads // call.heads_k, device=device)
        heads = (heads_k[:, None] * len(group) + group).flatten()
        indices: dict[str, Index] = {
            "q": (tokens, heads, dim),
            "k": (tokens, heads_k, dim),
            "v": (tokens, heads_k, dim_v),
            "out": (tokens, heads, dim_v),
            "sink": (heads,),
            "bias": (heads, ranges(blocks, lens * lens) if call.bias == "pairs" else tokens),
        }
        ends = torch.tensor([0, *(call.lens[n] for n in chosen)]).cumsum(0)
        options = {**x.options, "max_seqlen_q": max(call.lens[n] for n in chosen)}
        picked = Inputs(
            *(pick(getattr(x, n), indices[n]) for n in "qkv"),
            bias=None if x.bias is None else pick(x.bias, indices["bias"]),
            dout=pick(x.dout, indices["out"]) if x.dout is not None else None,
            cu_seqlens_q=ends.to(device=device, dtype=torch.int32),
            dropout_seed=x.dropout_seed,
            key_weight=None if x.key_weight is None else x.key_weight[tokens],
            alibi_slopes=None if x.alibi_slopes is None else x.alibi_slopes[heads],
            sink=None if x.sink is None else x.sink.detach()[heads],
            bias_grad=x.bias_grad,
            key_weight_grad=False,
            options=options,
        )
        return picked, indices


def _slot(tensor: str) -> str:
    """The name of the tensor that a result has the shape of: "q" for "dq" and "gq"."""
    return "out" if tensor in ("out", "gdout") else tensor[1:]


def _first(size: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(min(size, max(1, math.floor(count))), device=device)
