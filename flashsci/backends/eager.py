"""softmax(scale q k^T + bias) v in plain PyTorch operations, as a model would write it: for small calls and unusual
head dims.

No tile was made for those head dims. All scores are held: `auto` asks for this backend only if they are no more
numbers than the call's own tensors (`candidates.may_hold_scores`). Autograd differentiates it to any order. 16-bit
inputs are refused: their scores would round to 16 bits, and overflow in fp16.
"""

from __future__ import annotations

from torch import Tensor

from flashsci.backends import reference
from flashsci.call import kinds
from flashsci.call.ops import Scalars, Tensors
from flashsci.call.problem import Problem
from flashsci.call.torch_state import holds

FUSED = False
#: The tensors that it reads, by kind of call.
READS = {kinds.ATTENTION: frozenset(("q", "k", "v", "bias", "mask"))}


def unavailable() -> str | None:
    return None


def rejects(problem: Problem) -> str | None:
    if problem.batch_invariant:
        return "the order of sums in its batched products depends on the batch"
    lacks = (
        (problem.dtype.itemsize == 1, "8-bit floats"),
        (problem.paged, "paged cache"),
        (problem.varlen, "packed sequences"),
        (problem.softcap, "softcap"),
        (problem.dropout_p, "dropout by a given seed"),
        (problem.key_weight, "key_weight"),
        (problem.alibi, "ALiBi"),
        (problem.sink, "attention sinks"),
        (problem.return_lse, "lse to return"),
    )
    for asked, what in lacks:
        if asked:
            return f"it has no {what}"
    if problem.dtype.itemsize == 2:
        return "its scores would round to 16 bits"
    if (problem.precision, problem.device_type) == ("ieee", "cuda") and problem.dtype.itemsize == 4:
        return "its fp32 precision follows torch's global TF32 switch"
    return None


def forward(tensors: Tensors, scalars: Scalars) -> tuple[Tensor, None]:
    """out [*, Hq, Sq, Dv]; no lse."""
    q, k, v, bias, mask = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.mask
    heads = q.shape[-3] if q.dim() > 2 else 1
    k, v = (reference.per_query_head(x, heads) for x in (k, v))
    if holds(k.shape[-2] < q.shape[-1]):  # fewer scores than numbers in q
        scores = (q @ k.transpose(-1, -2)) * scalars.scale
    else:
        scores = (q * scalars.scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    window = scalars.window_left, scalars.window_right, scalars.lower_right
    keep = reference.visible(q.shape[-2], k.shape[-2], *window, q.device)
    if mask is not None:
        keep = mask if keep is None else keep & mask
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    if keep is None and bias is None:
        return scores.softmax(-1) @ v, None
    # A row that sees no key: softmax of zeros, so that its zero gradient meets no NaN; its out is 0.
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    p = scores.masked_fill(empty, 0.0).softmax(-1)
    return (p @ v).masked_fill(empty, 0.0), None


backward = reference.backward
