"""A check of a candidate's results, for the very shapes that are timed, before they are timed.

An fp64 oracle of a large case would take far longer than the benchmark, so a sample is checked:
some batch entries, heads and query rows. The output's gradient is zero outside the sample, which
makes every gradient, also those that are sums over everything (dK, dV, a broadcast bias), exactly
that of the sample alone, at full size of the launch. The allowance is that of the test suite
(flashsci.testing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.testing import Finding, Judge
from flashsci.testing import Inputs as Call
from tools.bench.inputs import Inputs

Function = Callable[[], Tensor]

#: Scores, or elements of keys and values, that the oracle may hold at once, by device type; it keeps
#: tens of fp64 arrays of that size.
BUDGET = {"cuda": 1 << 24, "cpu": 1 << 20}


@dataclass
class Verdict:
    """The findings on one pass ("forward" or "backward") of a candidate."""

    error: float  # largest absolute error against fp64
    ratio: float  # largest share of the allowance, over tensors and rules
    problem: str | None


def spread(size: int, count: int, device: torch.device) -> Tensor:
    """`count` of `size` indices, the last one always among them: errors are most likely at large offsets."""
    return torch.linspace(size - 1, 0, min(size, count), device=device).round().long().unique()


class Sample:
    """Part of a case with its oracle; judges any number of candidates."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        packed = inputs.cu_seqlens is not None
        self.call, self.indices = (self._packed if packed else self._dense)()

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.call)

    @cached_property
    def coarse_judge(self) -> Judge:
        """The judge for SDPA and TurboPairFormer, which take or round a bias to the dtype of q: this rounding is no error
        of theirs."""
        bias = self.call.bias
        if bias is None or bias.dtype == self.call.q.dtype:
            return self.judge
        return Judge(replace(self.call, bias=bias.to(self.call.q.dtype)))

    def _dense(self) -> tuple[Call, dict[str, tuple[Tensor, ...]]]:
        x, case, device = self.inputs, self.inputs.case, self.inputs.q.device
        budget = BUDGET[device.type]
        rows = spread(case.Sq, max(1, budget // case.Sk), device)
        # The size of one head: its scores or, if queries are few, its keys and values.
        each = max(len(rows) * (case.H // case.Hk), case.D + case.Dv)
        room = max(1, budget // (case.Sk * each))
        chosen = []
        for size in (case.Hk, *reversed(case.batch)):
            chosen.append(spread(size, room, device))
            room = max(1, room // len(chosen[-1]))
        heads_k, *batch = chosen
        batch.reverse()
        group = torch.arange(case.H // case.Hk, device=device)
        heads_q = (heads_k[:, None] * (case.H // case.Hk) + group).flatten()
        keys = torch.arange(case.Sk, device=device)
        all_d = {d: torch.arange(d, device=device) for d in (case.D, case.Dv)}
        indices = {
            "q": (*batch, heads_q, rows, all_d[case.D]),
            "k": (*batch, heads_k, keys, all_d[case.D]),
            "v": (*batch, heads_k, keys, all_d[case.Dv]),
            "out": (*batch, heads_q, rows, all_d[case.Dv]),
            "bias": (*batch, heads_q, rows, keys),
        }
        left, right = case.window or (-1, -1)
        right = 0 if case.causal else right
        visible = reference.visible(case.Sq, case.Sk, left, right, False, device)
        mask = None if x.mask is None else pick(x.mask, indices["bias"])
        if visible is not None:
            visible = visible[rows]
            mask = visible if mask is None else mask & visible
        call = Call(
            *(pick(t, indices[n]) for n, t in (("q", x.q), ("k", x.k), ("v", x.v))),
            bias=None if x.bias is None else pick(x.bias, indices["bias"]),
            mask=mask,
            dout=pick(x.dout, indices["out"]) if x.leaves else None,
            bias_grad="bias" in x.leaves,
        )
        return call, indices

    def _packed(self) -> tuple[Call, dict[str, tuple[Tensor, ...]]]:
        x, case, device = self.inputs, self.inputs.case, self.inputs.q.device
        lens = torch.tensor(case.lens)
        squares, budget = lens * lens * case.H, BUDGET[device.type]
        count = max(1, min(64, int(budget // squares.float().mean())))
        sequences = spread(len(lens), count, torch.device("cpu")).tolist()
        while len(sequences) > 1 and int(squares[sequences].sum()) > budget:
            sequences = sequences[1:]
        starts, blocks = lens.cumsum(0) - lens, (lens * lens).cumsum(0) - lens * lens

        def ranges(first: Tensor, size: Tensor) -> Tensor:
            parts = [torch.arange(int(size[n])) + first[n] for n in sequences]
            return torch.cat(parts).to(device)

        tokens, pairs = ranges(starts, lens), ranges(blocks, lens * lens)
        every = {n: torch.arange(n, device=device) for n in (case.H, case.Hk, case.D, case.Dv)}
        indices = {
            "q": (tokens, every[case.H], every[case.D]),
            "k": (tokens, every[case.Hk], every[case.D]),
            "v": (tokens, every[case.Hk], every[case.Dv]),
            "out": (tokens, every[case.H], every[case.Dv]),
            "bias": (every[case.H], pairs),
        }
        ends = torch.tensor([0, *(case.lens[n] for n in sequences)]).cumsum(0)
        options = {"causal": case.causal, "window": case.window}
        call = Call(
            *(pick(t, indices[n]) for n, t in (("q", x.q), ("k", x.k), ("v", x.v))),
            bias=None if x.bias is None else pick(x.bias, indices["bias"]),
            dout=pick(x.dout, indices["out"]) if x.leaves else None,
            cu_seqlens_q=ends.to(device=device, dtype=torch.int32),
            bias_grad="bias" in x.leaves,
            options=options,
        )
        return call, indices

    def verdicts(self, name: str, function: Function, passes: Sequence[str]) -> dict[str, Verdict]:
        """Run a candidate at full size and judge the sample of its results, by pass."""
        x = self.inputs
        judge = self.coarse_judge if name.startswith(("sdpa", "turbo")) else self.judge
        out = function()
        found = {"forward": self._verdict(judge, {"out": out.detach()})}
        if "backward" in passes:
            dout = torch.zeros_like(x.dout)
            where = grid(dout, self.indices["out"])
            dout[where] = x.dout[where]
            gradients = torch.autograd.grad(out, list(x.leaves.values()), dout)
            named = {f"d{n}": g for n, g in zip(x.leaves, gradients, strict=True)}
            found["backward"] = self._verdict(judge, named)
        return found

    def _verdict(self, judge: Judge, whole: dict[str, Tensor]) -> Verdict:
        findings: list[Finding] = []
        for name, x in whole.items():
            if not torch.isfinite(x).all():
                findings.append(Finding(name, float("inf"), problem=f"{name} is not finite"))
                continue
            part = pick(x, self.indices[name.removeprefix("d")])
            findings.append(judge.judge(name, part.to(judge.baseline[name].dtype)))
        problems = [f.problem for f in findings if f.problem]
        return Verdict(
            error=max(f.error for f in findings),
            ratio=max(max(f.ratios) for f in findings),
            problem="; ".join(problems) or None,
        )


def grid(x: Tensor, index: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Index of the grid spanned by one index vector per dim; a broadcast dim (size 1) stays."""
    rank = x.dim()
    return tuple(
        (i if x.shape[d] > 1 else i[:1] * 0).view(*(-1 if d == e else 1 for e in range(rank)))
        for d, i in enumerate(index)
    )


def pick(x: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    return x.detach()[grid(x, index)]
