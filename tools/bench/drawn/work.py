"""The work of one drawn call, by any function that computes its attention: forward, gradients, second order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashsci.testing import DrawnCall, Inputs, make_call

#: Attention of the tensors of a call.
Attend = Callable[[Inputs], Tensor]
Results = dict[str, Tensor]

LEARNT = ("q", "k", "v", "bias", "sink")


class Work:
    """One drawn call with its tensors; those that learn are leaves."""

    def __init__(self, call: DrawnCall, device: torch.device):
        self.call, self.device = call, device
        self.inputs = make_call(call, device)
        self.leaves: dict[str, Tensor] = {}
        if self.inputs.dout is None:
            return
        for name in LEARNT:
            x = getattr(self.inputs, name)
            if x is not None and (name != "bias" or call.bias_grad):
                self.leaves[name] = x.requires_grad_()
        if call.work == "second":
            self.inputs.dout = self.inputs.dout.requires_grad_()

    def results(self, attend: Attend, x: Inputs | None = None, dout: Tensor | None = None) -> Results:
        """out, every gradient and every gradient of the second order, by the names of the judge. ``x``: the inputs,
        with other options; ``dout``: another gradient of out."""
        x = self.inputs if x is None else x
        leaves, dout = self.leaves, x.dout if dout is None else dout
        if not leaves:
            with torch.no_grad():
                return {"out": attend(x)}
        out = attend(x)
        second = self.call.work == "second"
        first = torch.autograd.grad(out, list(leaves.values()), dout, create_graph=second)
        found = {"out": out, **{f"d{n}": g for n, g in zip(leaves, first, strict=True)}}
        if second:
            ends = {n: found[f"d{n[1:]}"] for n in x.tangents}
            wanted = [*leaves.values(), dout]
            tangents = [x.tangents[n] for n in ends]
            last = torch.autograd.grad(list(ends.values()), wanted, tangents, allow_unused=True)
            names = (*(f"g{n}" for n in leaves), "gdout")
            found |= {n: torch.zeros_like(w) if g is None else g for n, w, g in zip(names, wanted, last, strict=True)}
        return found

    def timed(self, attend: Attend) -> Callable[[], object]:
        """The call as a loop makes it: with dropout, each time another draw."""
        x = replace(self.inputs, dropout_seed=None)
        return lambda: self.results(attend, x)


def without_dropout(x: Inputs) -> Inputs:
    """The same call without dropout."""
    return replace(x, dropout_seed=None, options={**x.options, "dropout_p": 0.0})
