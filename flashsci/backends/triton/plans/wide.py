"""Launches for wide heads: products of whole heads, and one kernel on the scores between them, a section of heads at a time.

A multiprocessor has no room for the tiles of heads this wide. The scores of a section are in memory, which does not grow with the
batch.
"""

from typing import NamedTuple

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


class Section(NamedTuple):
    """Neighbouring heads whose scores are in memory at a time: some of one sequence, all of some sequences of one b0, or all of some
    b0."""

    first: int  # key head, over all batch members
    count: int  # of key heads
    box: tuple[slice, slice, slice]  # of (b0, b1, query head)


def sections_of(lead: tuple[int, int], heads_k: int, group: int, scores: int) -> list[Section]:
    """The sections of a call, of at most tilings.FEW_SCORES scores or one key head. scores: of a query head."""
    most, whole = max(1, tilings.FEW_SCORES // max(1, group * scores)), slice(None)
    per_b0 = lead[1] * heads_k
    found = []
    if most >= per_b0:
        step = most // per_b0
        for b in range(0, lead[0], step):
            last = min(b + step, lead[0])
            found.append(Section(b * per_b0, (last - b) * per_b0, (slice(b, last), whole, whole)))
        return found
    for b0 in range(lead[0]):
        step = max(1, most // heads_k)
        for b1 in range(0, lead[1], step):
            first, last = b0 * per_b0 + b1 * heads_k, min(b1 + step, lead[1])
            here = slice(b0, b0 + 1), slice(b1, last)
            if most >= heads_k:
                found.append(Section(first, (last - b1) * heads_k, (*here, whole)))
                continue
            for h in range(0, heads_k, most):
                end = min(h + most, heads_k)
                found.append(Section(first + h, end - h, (*here, slice(h * group, end * group))))
    return found


class PairSums:
    """Sums of a value of each pair over the dims that a tensor is broadcast along, section by section. like: the tensor, or None; then
    nothing is summed."""

    def __init__(self, wide: "Wide", like: torch.Tensor | None):
        self.wide, self.like, self.sums = wide, like, None

    def add(self, part: Section, found: torch.Tensor | None) -> None:
        """found: the values of the section's heads."""
        if self.like is None:
            return
        p = self.wide.plan
        if len(self.wide.sections) == 1:
            self.sums = reduce_to(found.view(p.score_shape), self.like)
            return
        shape = (1,) * (5 - self.like.dim()) + tuple(self.like.shape)
        if self.sums is None:
            self.sums = found.new_zeros(shape)
        here = tuple(slice(None) if n == 1 else x for n, x in zip(shape, part.box, strict=False))
        inside = self.sums[here]
        full = [len(range(*x.indices(n))) for n, x in zip((*p.lead, p.heads), part.box, strict=True)]
        values = found.view(*full, p.size_q, p.size_k)
        dims = [d for d, (n, m) in enumerate(zip(values.shape, inside.shape, strict=True)) if n != m]
        inside += values.sum(dims, keepdim=True) if dims else values

    def result(self) -> torch.Tensor | None:
        return None if self.sums is None else self.sums.view(self.like.shape).to(self.like.dtype)


class Wide:
    """The values that the launches of one kind of call share, in addition to its Plan (dense.py).

    `gate` is (), or the gate and, in the second order, its tangent; `wants_gate`: its gradient is wanted.
    """

    forward_kernel, backward_kernel = wide_forward_kernel, wide_backward_kernel

    def __init__(self, plan):
        self.plan = plan
        self.launches: dict[object, Launch] = {}
        self.vector = 4 if plan.size_k % 4 == 0 else 1  # fp32 numbers of a row of scores in one load
        self.sections = sections_of(plan.lead, plan.heads_k, plan.group, plan.size_q * plan.size_k)

    def scores(self, part: Section, like) -> torch.Tensor:
        """Memory for the scores of a section's heads."""
        p = self.plan
        return like.new_empty((1, 1, part.count * p.group, p.size_q, p.size_k))

    def rows(self, part: Section, x: torch.Tensor) -> torch.Tensor:
        """The part of lse, or of a tensor like it, that belongs to a section."""
        size = self.plan.group * self.plan.size_q
        return x.view(-1)[part.first * size : (part.first + part.count) * size]

    def product(self, kind: str, part: Section, out, a, b, a2=None, b2=None, factor: float = 1.0) -> torch.Tensor:
        """out = factor (a b + a2 b2) for every head of a section."""
        strides = tuple([None if x is None else x.stride() for x in (out, a, b, a2, b2)])
        key = kind, part.first, part.count, out.shape, strides, factor
        if key not in self.launches:
            self.launches[key] = self._product(kind, part, out, a, b, a2, b2, factor)
        launch, pieces = self.launches[key]
        if pieces == 1:
            launch(a, b, a2, b2, out)
            return out
        found = out.new_empty((pieces, part.count * self.plan.group, *out.shape[-2:]))
        launch(a, b, a2, b2, found)
        inside = out[(None,) * (5 - out.dim())][part.box]
        torch.sum(found.view(pieces, *inside.shape), 0, out=inside)
        return out

    def _product(self, kind: str, part: Section, out, a, b, a2, b2, factor: float) -> tuple[Launch, int]:
        """The launch, and the number of pieces of its sum."""
        p = self.plan
        of_keys = kind == KEYS
        rows, columns = (p.size_k if of_keys else p.size_q), out.shape[-1]
        depth = a.shape[-1] if kind == SCORES else p.size_q if of_keys else p.size_k
        each = 1 if of_keys else p.group  # heads of the result for a key head
        vector = p.vector
        m, n, k, warps, stages = tilings.product_config(p.device.capability, kind == SCORES, rows, depth, vector > 1)
        tiles_m, tiles_n = -(-rows // m), -(-columns // n)
        programs = part.count * each * tiles_m * tiles_n
        pieces, piece = tilings.pieces_of(p.device.processors, programs, depth, k) if kind == QUERIES else (1, depth)
        size = rows * columns
        of_out = strides4(out.stride()) if pieces == 1 else (0, part.count * each * size, size, columns)
        turned_a, turned_b = of_keys, kind == SCORES
        of_a, of_b = (rows, m) if turned_a else (depth, k), (depth, k) if turned_b else (columns, n)
        arguments = {
            "strides": ProductStrides(*(NO_STRIDES[:4] if x is None else strides4(x.stride()) for x in (a, b, a2, b2)), of_out),
            "product": Product(
                part.first * each, p.lead[1], p.heads_k * each, p.group if of_keys else 1, 1 if of_keys else p.group,
                rows, columns, depth, part.count * each, piece, tiles_m, tiles_n, factor,
            ),
            "A": Operand(turned_a, of_a[0] % of_a[1] != 0, kind != SCORES, vector if kind == SCORES else self.vector),
            "B": Operand(turned_b, of_b[0] % of_b[1] != 0, False, vector),
            "OUT_VECTOR": self.vector if kind == SCORES else vector,
            "OUT_LOCAL": kind == SCORES or pieces > 1,
            "GROUPED": of_keys and p.group > 1,
            "PIECES": pieces > 1,
            "PRECISION": p.precision,
            "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages,
        }  # fmt: skip
        return Launch(product_kernel, pieces * programs, arguments), pieces

    def between(self, kernel, part: Section) -> Launch:
        """The launch of a first-order kernel on the scores of a section between two products."""
        key = kernel, part.first, part.count
        if key not in self.launches:
            self.launches[key] = self.of_scores(kernel, part)
        return self.launches[key]

    def of_scores(self, kernel, part: Section, narrower: int = 1, **more) -> Launch:
        """A launch of a kernel on the scores of a section. narrower: the factor by which its tiles are narrower, because it has
        many of them."""
        p = self.plan
        block_m, block_n, warps = tilings.rows_config(p.size_q, p.size_k, narrower)
        tiles = -(-p.size_q // block_m)
        arguments = {name: p.arguments[name] for name in ("strides", "sizes", "mod", "F")} | {
            "tiles": (tiles, part.first * p.group),
            "VECTOR": self.vector,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": warps,
            "num_stages": 1,
        }
        return Launch(kernel, tiles * part.count * p.group, arguments | more)

    def forward(self, tensors, out, lse, gate: tuple = ()) -> None:
        """Fill out and lse."""
        q, k, v = tensors[:3]
        for part in self.sections:
            scores = self.product(SCORES, part, self.scores(part, q), q, k)
            self.between(self.forward_kernel, part)(tensors, *gate, scores, self.rows(part, lse))
            self.product(QUERIES, part, out, scores, v)

    def backward(
        self, dout, dlse, tensors, out, lse, results, need: int, gate: tuple = (), wants_gate: bool = False
    ) -> tuple:
        """Fill dq, dk, dv in `results`, each of which may be None; return dbias, dweight and dgate, None where they are not
        wanted."""
        q, k, v, bias, weight = tensors[:5]
        dq, dk, dv = results
        delta = self.delta(dout, out, lse, dlse)
        scale = self.plan.arguments["mod"].scale
        sums = Gradients(self, bias, weight, gate[0] if wants_gate else None, need, q)
        for part in self.sections:
            kept = self.product(SCORES, part, self.scores(part, q), q, k)
            ds = self.product(SCORES, part, self.scores(part, q), dout, v)
            room = sums.room(part)
            pairs = room[2:] if gate else ()
            run = self.between(self.backward_kernel, part)
            run(tensors, *gate, kept, ds, self.rows(part, lse), self.rows(part, delta), *room[:2], *pairs)
            if dq is not None:
                self.product(QUERIES, part, dq, ds, k, factor=scale)
            if dk is not None:
                self.product(KEYS, part, dk, ds, q, factor=scale)
            if dv is not None:
                self.product(KEYS, part, dv, kept, dout)
            sums.add(part, room, ds)
        return sums.results()

    def tangents(self, run, tangents, tensors, lse, tout, mean, gate: tuple = ()) -> None:
        """Fill tout, mean: tangents of out and lse. run: as SecondOrderLaunches.wide, the launch for a section."""
        room = (None, None, None) if gate else (None, None)
        for part in self.sections:
            w, _, _, kept = self._moved(run, part, tangents, tensors, lse, mean, NEED_DOUT, room=room, gate=gate)
            self._tangent_of_out(part, tout, w, kept, tensors, tangents)

    def double_backward(
        self,
        run,
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
        wants_gate: bool = False,
    ) -> tuple:
        """Fill gq, gk, gv, tout in `results`, each of which may be None, and mean; return gbias, gweight and ggate, None where
        they are not wanted."""
        q, k, _, bias, weight = tensors[:5]
        tq, tk = tangents[:2]
        gq, gk, gv, tout = results
        delta = self.delta(dout, out, lse, dlse)
        scale = self.plan.arguments["mod"].scale
        sums = Gradients(self, bias, weight, gate[0] if wants_gate else None, need, q)
        for part in self.sections:
            room = sums.room(part)
            taken = room if gate else room[:2]
            w, e, f, kept = self._moved(run, part, tangents, tensors, lse, mean, need, dout, delta, taken, gate)
            if tout is not None:
                self._tangent_of_out(part, tout, w, kept, tensors, tangents)
            if gq is not None:
                self.product(QUERIES, part, gq, f, k, *(() if tk is None else (e, tk)), factor=scale)
            if gk is not None:
                self.product(KEYS, part, gk, f, q, *(() if tq is None else (e, tq)), factor=scale)
            if gv is not None:
                self.product(KEYS, part, gv, w, dout)
            sums.add(part, room, f)
        return sums.results()

    def _moved(self, run, part, tangents, tensors, lse, mean, need, dout=None, delta=None, room=(), gate=()):
        """R W, E', F', R P of a section, see wide_double_backward.py; its part of mean is filled."""
        q, k, v = tensors[:3]
        tq, tk, tv = tangents[:3]
        w = self.product(SCORES, part, self.scores(part, q), q, k)
        moving = [x for x in ((tq, k), (q, tk)) if x[0] is not None and x[1] is not None]
        e = self.product(SCORES, part, self.scores(part, q), *sum(moving, ())) if moving else None
        f = tdp = None
        if dout is not None:
            f = self.product(SCORES, part, self.scores(part, q), dout, v)
            tdp = None if tv is None else self.product(SCORES, part, self.scores(part, q), dout, tv)
            delta = self.rows(part, delta)
        kept = self.scores(part, q) if tv is not None and need & NEED_DOUT else None
        launch = run(self, part)
        launch(tensors, tangents, *gate, w, e, f, tdp, self.rows(part, lse), delta, kept, *room, self.rows(part, mean))
        return w, e, f, kept

    def _tangent_of_out(self, part, tout, w, kept, tensors, tangents) -> None:
        pair = () if kept is None else (kept, tangents[2])
        self.product(QUERIES, part, tout, w, tensors[2], *pair)

    def delta(self, dout, out, lse, dlse) -> torch.Tensor:
        reference, delta = torch.empty_like(lse), torch.empty_like(lse)
        self.plan.delta()(dout, out, lse, dlse, reference, delta)
        return delta


class Gradients:
    """The gradients of bias, key weights and gate of a call, each None if it is not wanted, section by section."""

    def __init__(self, wide: Wide, bias, weight, gate, need: int, like: torch.Tensor):
        features = wide.plan.arguments["F"]
        self.wide, self.weight, self.like = wide, weight, like
        self.bias = PairSums(wide, bias if need & NEED_BIAS else None)
        self.gate = PairSums(wide, gate)
        # Those of the bias at each pair are not those of products if a softcap bounds the products alone.
        self.beside = self.bias.like is not None and features.SOFTCAP and not features.CAPS_BIAS
        self.weighted = weight is not None and bool(need & NEED_KEY_WEIGHT)
        self.weights = wide.plan.weight_sums(like) if self.weighted else None

    def room(self, part: Section) -> tuple:
        """Memory for a section's gradients at each pair: of a bias, key weights, a gate; None where they are not needed."""
        needed = (self.beside, self.weighted, self.gate.like is not None)
        return tuple(self.wide.scores(part, self.like) if wanted else None for wanted in needed)

    def add(self, part: Section, room: tuple, ds: torch.Tensor) -> None:
        """Add those of a section. ds: that of its scores."""
        beside, terms, gated = room
        self.bias.add(part, ds if beside is None else beside)
        self.gate.add(part, gated)
        if self.weights is not None:
            p = self.wide.plan
            grouped = terms.view(part.count, p.group, p.size_q, p.size_k)
            sums = self.weights.view(-1, p.size_k)[part.first : part.first + part.count]
            torch.sum(grouped, (1, 2), out=sums)

    def results(self) -> tuple:
        dweight = None if self.weights is None else reduce_to(self.weights, self.weight)
        return self.bias.result(), dweight, self.gate.result()
