"""Launches for wide heads: products of whole heads, and one kernel on the scores between them.

A multiprocessor has no room for the tiles of heads this wide, and the scores in memory are few compared with the
rows.
"""

import torch

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.groups import Operand, Product, ProductStrides
from flashsci.backends.triton.kernels.wide_backward import wide_backward_kernel
from flashsci.backends.triton.kernels.wide_forward import wide_forward_kernel
from flashsci.backends.triton.kernels.wide_products import product_kernel
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans.bias import reduce_to
from flashsci.backends.triton.plans.strides import NO_STRIDES, strides4
from flashsci.call.ops import NEED_BIAS, NEED_DOUT, NEED_KEY_WEIGHT

# Products, by their results: rows of queries by rows of keys; scores by rows of keys; scores, transposed, by rows of
# queries, summed over the query heads of each key head.
SCORES, QUERIES, KEYS = "scores", "queries", "keys"


class Wide:
    """The values that the launches of one kind of call share, in addition to its Plan (dense.py).

    `gate` is (), or the gate and, in the second order, its tangent; `pairs` is (), or memory for the gradient of the gate at each pair.
    """

    forward_kernel, backward_kernel = wide_forward_kernel, wide_backward_kernel

    def __init__(self, plan):
        self.plan = plan
        self.launches: dict[object, Launch] = {}
        self.vector = 4 if plan.size_k % 4 == 0 else 1  # fp32 numbers of a row of scores in one load

    def scores(self, like) -> torch.Tensor:
        """Memory for the scores of every head."""
        p = self.plan
        return like.new_empty((*p.lead, p.heads, p.size_q, p.size_k))

    def product(self, kind: str, out, a, b, a2=None, b2=None, factor: float = 1.0) -> torch.Tensor:
        """out = factor (a b + a2 b2) for every head."""
        strides = tuple([None if x is None else x.stride() for x in (out, a, b, a2, b2)])
        key = kind, out.shape, strides, factor
        if key not in self.launches:
            self.launches[key] = self._product(kind, out, a, b, a2, b2, factor)
        self.launches[key](a, b, a2, b2, out)
        return out

    def _product(self, kind: str, out, a, b, a2, b2, factor: float) -> Launch:
        p = self.plan
        of_keys = kind == KEYS
        rows, columns = (p.size_k if of_keys else p.size_q), out.shape[-1]
        depth = a.shape[-1] if kind == SCORES else p.size_q if of_keys else p.size_k
        heads = p.heads_k if of_keys else p.heads
        vector = p.vector
        m, n, k, warps, stages = tilings.product_config(p.device.capability, kind == SCORES, rows, depth, vector > 1)
        tiles_m, tiles_n = -(-rows // m), -(-columns // n)
        turned_a, turned_b = of_keys, kind == SCORES
        of_a, of_b = (rows, m) if turned_a else (depth, k), (depth, k) if turned_b else (columns, n)
        arguments = {
            "strides": ProductStrides(*(NO_STRIDES[:4] if x is None else strides4(x.stride()) for x in (a, b, a2, b2, out))),
            "product": Product(
                p.lead[1], heads, p.group if of_keys else 1, 1 if of_keys else p.group, rows, columns, depth, tiles_m, tiles_n, factor
            ),
            "A": Operand(turned_a, of_a[0] % of_a[1] != 0, vector if kind == SCORES else self.vector),
            "B": Operand(turned_b, of_b[0] % of_b[1] != 0, vector),
            "OUT_VECTOR": self.vector if kind == SCORES else vector,
            "GROUPED": of_keys and p.group > 1,
            "PRECISION": p.precision,
            "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages,
        }  # fmt: skip
        return Launch(product_kernel, p.batch * heads * tiles_m * tiles_n, arguments)

    def between(self, kernel) -> Launch:
        """The launch of a first-order kernel on all scores between two products."""
        if kernel not in self.launches:
            self.launches[kernel] = self.of_scores(kernel)
        return self.launches[kernel]

    def of_scores(self, kernel, narrower: int = 1, **more) -> Launch:
        """A launch of a kernel on all scores. narrower: the factor by which its tiles are narrower, because it has
        many of them."""
        p = self.plan
        block_m, block_n, warps = tilings.rows_config(p.size_q, p.size_k, narrower)
        tiles = -(-p.size_q // block_m)
        arguments = {name: p.arguments[name] for name in ("strides", "sizes", "mod", "F")} | {
            "tiles": tiles,
            "VECTOR": self.vector,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": warps,
            "num_stages": 1,
        }
        return Launch(kernel, tiles * p.batch * p.heads, arguments | more)

    def forward(self, tensors, out, lse, gate: tuple = ()) -> None:
        """Fill out and lse."""
        q, k, v = tensors[:3]
        scores = self.product(SCORES, self.scores(q), q, k)
        self.between(self.forward_kernel)(tensors, *gate, scores, lse)
        self.product(QUERIES, out, scores, v)

    def backward(self, dout, dlse, tensors, out, lse, results, need: int, gate: tuple = (), pairs: tuple = ()) -> tuple:
        """Fill dq, dk, dv in `results`, each of which may be None; return dbias and dweight, None where `need` does
        not name them."""
        q, k, v, bias, weight = tensors[:5]
        dq, dk, dv = results
        kept = self.product(SCORES, self.scores(q), q, k)
        ds = self.product(SCORES, self.scores(q), dout, v)
        delta = self.delta(dout, out, lse, dlse)
        room = self.room(bias, weight, need, q)
        self.between(self.backward_kernel)(tensors, *gate, kept, ds, lse, delta, *room, *pairs)
        scale = self.plan.arguments["mod"].scale
        if dq is not None:
            self.product(QUERIES, dq, ds, k, factor=scale)
        if dk is not None:
            self.product(KEYS, dk, ds, q, factor=scale)
        if dv is not None:
            self.product(KEYS, dv, kept, dout)
        return self.sums(room, ds, bias, weight, need)

    def tangents(self, run: Launch, tangents, tensors, lse, tout, mean, gate: tuple = (), pairs: tuple = ()) -> None:
        """Fill tout, mean: tangents of out and lse. run: as from SecondOrder.wide."""
        w, _, _, kept = self._moved(run, tangents, tensors, lse, mean, NEED_DOUT, gate=gate, pairs=pairs)
        self._tangent_of_out(tout, w, kept, tensors, tangents)

    def double_backward(
        self,
        run: Launch,
        tangents,
        dout,
        dlse,
        tensors,
        out,
        lse,
        results,
        mean,
        need: int,
        gate: tuple = (),
        pairs: tuple = (),
    ) -> tuple:
        """Fill gq, gk, gv, tout in `results`, each of which may be None, and mean; return gbias and gweight, None
        where `need` does not name them."""
        q, k, _, bias, weight = tensors[:5]
        tq, tk = tangents[:2]
        gq, gk, gv, tout = results
        room = self.room(bias, weight, need, q)
        delta = self.delta(dout, out, lse, dlse)
        w, e, f, kept = self._moved(run, tangents, tensors, lse, mean, need, dout, delta, room, gate, pairs)
        if tout is not None:
            self._tangent_of_out(tout, w, kept, tensors, tangents)
        scale = self.plan.arguments["mod"].scale
        if gq is not None:
            self.product(QUERIES, gq, f, k, *(() if tk is None else (e, tk)), factor=scale)
        if gk is not None:
            self.product(KEYS, gk, f, q, *(() if tq is None else (e, tq)), factor=scale)
        if gv is not None:
            self.product(KEYS, gv, w, dout)
        return self.sums(room, f, bias, weight, need)

    def _moved(
        self, run, tangents, tensors, lse, mean, need, dout=None, delta=None, room=(None, None), gate=(), pairs=()
    ):
        """R W, E', F', R P, see wide_double_backward.py; mean is filled."""
        q, k, v = tensors[:3]
        tq, tk, tv = tangents[:3]
        w = self.product(SCORES, self.scores(q), q, k)
        moving = [x for x in ((tq, k), (q, tk)) if x[0] is not None and x[1] is not None]
        e = self.product(SCORES, self.scores(q), *sum(moving, ())) if moving else None
        f = tdp = None
        if dout is not None:
            f = self.product(SCORES, self.scores(q), dout, v)
            tdp = None if tv is None else self.product(SCORES, self.scores(q), dout, tv)
        kept = self.scores(q) if tv is not None and need & NEED_DOUT else None
        run(tensors, tangents, *gate, w, e, f, tdp, lse, delta, kept, *room, *pairs, mean)
        return w, e, f, kept

    def _tangent_of_out(self, tout, w, kept, tensors, tangents) -> None:
        pair = () if kept is None else (kept, tangents[2])
        self.product(QUERIES, tout, w, tensors[2], *pair)

    def delta(self, dout, out, lse, dlse) -> torch.Tensor:
        reference, delta = torch.empty_like(lse), torch.empty_like(lse)
        self.plan.delta()(dout, out, lse, dlse, reference, delta)
        return delta

    def room(self, bias, weight, need: int, like) -> tuple:
        """Memory for the gradients of a bias at each pair, and for the terms of the gradient of key weights.

        The former is needed if they are not those of products: if a softcap bounds the products alone.
        """
        features = self.plan.arguments["F"]
        beside = bias is not None and need & NEED_BIAS and features.SOFTCAP and not features.CAPS_BIAS
        weighted = weight is not None and need & NEED_KEY_WEIGHT
        return tuple(self.scores(like) if wanted else None for wanted in (beside, weighted))

    def sums(self, room: tuple, ds, bias, weight, need: int) -> tuple:
        """The gradients of bias and key weights, None where not needed. ds: that of scores."""
        p, (beside, terms) = self.plan, room
        dbias = dweight = None
        if bias is not None and need & NEED_BIAS:
            dbias = reduce_to((ds if beside is None else beside).view(p.score_shape), bias)
        if terms is not None:
            sums = p.weight_sums(terms)
            grouped = terms.view(p.batch, p.heads_k, p.group, p.size_q, p.size_k)
            torch.sum(grouped, (2, 3), out=sums.view(p.batch, p.heads_k, p.size_k))
            dweight = reduce_to(sums, weight)
        return dbias, dweight
