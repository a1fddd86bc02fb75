"""Launches of the double backward along many directions."""

import torch

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.many_backward import ROW_SUMS, STORE
from flashsci.backends.triton.kernels.many_double_backward import (
    many_double_backward_keys_kernel,
    many_double_backward_queries_kernel,
)
from flashsci.backends.triton.launcher import Launch
from flashsci.backends.triton.plans import many_backward, many_jvp
from flashsci.backends.triton.plans.bias import NO_ROUTE, reduce_to
from flashsci.backends.triton.plans.dense import DensePlan, longest_class, rows_of
from flashsci.backends.triton.plans.many_backward import Table, Tables, row_strides, scheduled, tiles_of, whole_rows
from flashsci.backends.triton.plans.many_jvp import along_of, layouts_of, plan_along, steps_of, tangent_arguments
from flashsci.backends.triton.plans.second_order import inner
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_DLSE,
    NEED_DOUT,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Tangents,
    count_of,
    fake_forward,
    fake_many_double_backward,
    stacked,
)
from flashsci.errors import BackendError

# As in many_backward.py, of the kernels by queries and by keys. Plain calls do not spill; others spill less than the kernels of one
# direction, but for windows on sm_80. A key tile of Hopper has 16 rows for each warp: with fewer, Triton would move accumulators between
# two layouts in every step.
HOPPER_16BIT: Table = {
    "queries": {32: ((64, 32, 4, 2, 4), (64, 16, 4, 2, 2)), 64: ((64, 32, 4, 2, 2), (64, 16, 4, 2, 2))},
    "keys": {32: ((16, 128, 8, 2, 4), (16, 128, 8, 2, 2)), 64: ((16, 128, 8, 2, 2), (16, 128, 8, 2, 2))},
}
AMPERE_16BIT: Table = {
    "queries": {32: ((64, 32, 4, 2, 2), (64, 16, 4, 2, 2)), 64: ((64, 16, 4, 2, 2), (32, 32, 4, 2, 2))},
    "keys": {32: ((16, 64, 4, 2, 2), (16, 32, 4, 2, 2)), 64: ((32, 32, 4, 2, 2), (32, 32, 8, 2, 2))},
}
INTERPRETER: Table = {
    "queries": {32: ((32, 16, 4, 1, 4), (32, 16, 4, 1, 2)), 64: ((32, 16, 4, 1, 2), (32, 16, 4, 1, 2))},
    "keys": {64: ((32, 16, 4, 1, 2), (32, 16, 4, 1, 2))},
}
TABLES = Tables(HOPPER_16BIT, AMPERE_16BIT, INTERPRETER)


def has_kernels(saved: Saved, need: int) -> bool:
    return many_backward.has_kernels(saved, need, TABLES)


def shares(tangents: Tangents, dout, dlse, saved: Saved, need: int) -> bool:
    """Whether kernels share P among the directions, and are faster for it: of narrow rows, as those for many cotangents.

    Where one program has a whole sequence, it is the faster one: it needs 12 products for a direction in one launch, these kernels 15 in
    three, and 5 for each group.
    """
    if not has_kernels(saved, need) or not many_backward.gains(saved):
        return False
    return many_backward.whole_of(tilings.double_backward_small_config, saved) is None


def many_double_backward(tangents: Tangents, dout, dlse, saved: Saved, need: int):
    """Gradients of q, k, v, bias, key weights, dout, dlse along directions, [n, *], for cotangents tq, ... of the first five's gradients,
    also [n, *] (None: zero); those that `need` does not name are empty."""
    tensors, out, lse, scalars = saved
    q, k, v, bias, weight = tensors[:5]
    if not has_kernels(saved, need):
        raise BackendError(
            f"flashsci: the double backward along many directions has no kernel here for head dims {q.shape[-1]} and {v.shape[-1]} in "
            f"{str(q.dtype).removeprefix('torch.')}, these features and gradients; compute one direction after the other"
        )
    count = count_of(tangents)
    found = fake_many_double_backward(count, tensors, need)
    if count * out.numel() * k.shape[-2] == 0:
        for x in found:
            x.zero_()
        return found
    gq, gk, gv = (x if need & bit else None for x, bit in zip(found, (NEED_Q, NEED_K, NEED_V), strict=False))
    gbias = found[3] if bias is not None and need & NEED_BIAS else None
    gweight = found[4] if weight is not None and need & NEED_KEY_WEIGHT else None
    made = zip(found[5:], fake_forward(tensors), (NEED_DOUT, NEED_DLSE), strict=True)
    tout, mean = (x if need & bit else stacked(like, count) for x, like, bit in made)
    out, lse = inner(out), lse.contiguous()
    dout = rows_of(None, out) if dout is None else whole_rows(inner(dout))
    dlse = None if dlse is None else dlse.contiguous()
    along, inputs = along_of(tangents), tuple(tensors)
    longest = longest_class(scalars.max_seqlen_q, scalars.max_seqlen_k)
    p = plan_along(along, dout, Saved(tensors, out, lse, scalars), longest)
    delta, zeta = torch.empty_like(lse), torch.empty_like(mean)
    first = many_jvp.launch(p, along, tout, mean, many_jvp.most_of(tangents, saved), True)
    first(inputs, tuple(along), out, lse, dout, dlse, tout, mean, delta, zeta)
    use, into = NO_ROUTE[0], None
    if gbias is not None:
        use = STORE.value if bias.shape[-1] != 1 or p.size_k == 1 else ROW_SUMS.value
        into = gbias if use == STORE.value else torch.empty_like(mean)
        if p.window or p.ragged or p.tiles:  # scores that no query tile visits are not written
            gbias.zero_()
    common = inputs, tuple(along), lse, dout, mean, delta, zeta
    if gq is not None or use:
        queries(p, saved, along, mean, gq, use, into)(*common, gq, into)
    sums = None if gweight is None else k.new_empty((count, *k.shape[:-1]), dtype=torch.float32)
    if not (gk is gv is sums is None):
        keys(p, saved, along, mean, gk, gv, sums)(*common, gk, gv, sums)
    if use == ROW_SUMS.value:
        gbias.copy_(reduce_to(into.unsqueeze(-1), gbias))
    if gweight is not None:
        gweight.copy_(reduce_to(sums, gweight))
    return found


def queries(p: DensePlan, saved: Saved, along: Tangents, mean, gq, use: int, gbias) -> Launch:
    steps = steps_of(*along, mean, gq, gbias)
    key = "many_double_backward_queries", len(mean), steps, layouts_of(along), use
    if key not in p.launches:
        row = tiles_of(saved, TABLES)["queries"]
        programs, arguments = scheduled(p, "double_backward_queries", row, len(mean))
        one = None if gbias is None else gbias[0]
        vector = p.stored_vector(one, use)
        arguments.update(
            tangent_arguments(p, along),
            dout_strides=p.strides[3],
            gq_strides=row_strides(gq),
            gbias_strides=p.gradient_strides(one, use),
            tiles=(len(mean), steps),
            BIAS_GRADIENT=use,
            GBIAS_VECTOR=1 if steps[7] % vector else vector,
        )
        p.launches[key] = Launch(many_double_backward_queries_kernel, programs, arguments)
    return p.launches[key]


def keys(p: DensePlan, saved: Saved, along: Tangents, mean, gk, gv, sums) -> Launch:
    steps = steps_of(*along, mean, gk, gv, sums)
    key = "many_double_backward_keys", len(mean), steps, layouts_of(along)
    if key not in p.launches:
        row = tiles_of(saved, TABLES)["keys"]
        programs, arguments = scheduled(p, "double_backward_keys", row, len(mean))
        arguments.update(
            tangent_arguments(p, along),
            dout_strides=p.strides[3],
            gk_strides=row_strides(gk),
            gv_strides=row_strides(gv),
            tiles=(len(mean), steps),
        )
        p.launches[key] = Launch(many_double_backward_keys_kernel, programs, arguments)
    return p.launches[key]
