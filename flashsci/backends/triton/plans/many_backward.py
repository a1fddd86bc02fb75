"""Launches of the gradients for many cotangents."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashsci.backends.triton import tilings
from flashsci.backends.triton.kernels.many_backward import ROW_SUMS, STORE, many_dkdv_kernel, many_dq_kernel
from flashsci.backends.triton.launcher import Launch, device_of
from flashsci.backends.triton.plans.bias import NO_ROUTE, reduce_to
from flashsci.backends.triton.plans.dense import DensePlan, longest_class, longest_of, options_of, plan_of, rows_of
from flashsci.backends.triton.plans.many_jvp import group_of
from flashsci.backends.triton.plans.second_order import inner
from flashsci.backends.triton.plans.strides import strides4
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Tensors,
    count_of,
    fake_many_backward,
)
from flashsci.errors import BackendError

# (BLOCK_M, BLOCK_N, warps, stages, directions of a program at most) of the kernels of dq, and of dk and dv, for head dims up to the key,
# in 16 bits: in fp32 sharing gains 3 %, and Triton 3.6 reads beyond shared memory in dk and dv with a window.
# The first row is for plain calls, the second for those with a bias, mask, key weights, dropout, softcap or ALiBi; of dk and dv also for
# those that a window or offsets cut.
NARROW = 32
Row = tuple[int, int, int, int, int]
Table = dict[str, dict[int, tuple[Row, Row]]]


class Tables(NamedTuple):
    """The tables of a pass for many directions, by device."""

    hopper: Table
    ampere: Table
    interpreter: Table


HOPPER_16BIT: Table = {
    "queries": {32: ((64, 32, 4, 2, 4), (64, 16, 4, 2, 2)), 64: ((64, 32, 4, 2, 2), (64, 16, 4, 2, 2))},
    "keys": {32: ((32, 64, 4, 2, 4), (32, 64, 8, 2, 2)), 64: ((32, 64, 8, 2, 2), (32, 64, 8, 2, 2))},
}
AMPERE_16BIT: Table = {
    "queries": {32: ((64, 32, 4, 2, 4), (64, 16, 4, 2, 2)), 64: ((64, 32, 4, 2, 2), (32, 32, 4, 2, 2))},
    "keys": {32: ((32, 32, 4, 2, 2), (32, 32, 4, 2, 2)), 64: ((32, 32, 4, 2, 2), (32, 32, 8, 2, 2))},
}
INTERPRETER: Table = {
    "queries": {32: ((32, 16, 4, 1, 4), (32, 16, 4, 1, 2)), 64: ((32, 16, 4, 1, 2), (32, 16, 4, 1, 2))},
    "keys": {64: ((32, 16, 4, 1, 2), (32, 16, 4, 1, 2))},
}


TABLES = Tables(HOPPER_16BIT, AMPERE_16BIT, INTERPRETER)


def table_of(tables: Tables, capability: tuple[int, int] | None, dtype: torch.dtype) -> Table | None:
    if capability is None:
        return tables.interpreter
    if dtype.itemsize != 2 or capability < (8, 0):
        return None
    return tables.hopper if capability[0] == 9 else tables.ampere


def tiles_of(saved: Saved, tables: Tables = TABLES) -> dict[str, Row] | None:
    """The rows of the table by kernel; None: a program has no room for several directions."""
    tensors, scalars = saved.tensors, saved.scalars
    q, k, v = tensors[:3]
    capability, dims = device_of(q.device).capability, (q.shape[-1], v.shape[-1])
    if capability is not None and not all(map(in_16_bytes, (q, k, v))):
        return None  # one load for each number
    table = table_of(tables, capability, q.dtype)
    if table is None or max(dims) > max(table["queries"]):
        return None
    addends = tensors.bias, tensors.mask, tensors.key_weight, tensors.alibi_slopes
    rich = any(x is not None for x in addends) or bool(scalars.dropout_p or scalars.softcap)
    cut = scalars.windowed() or tensors.cu_seqlens_q is not None
    found = {name: next(row for most, row in rows.items() if max(dims) <= most) for name, rows in table.items()}
    return {"queries": found["queries"][rich], "keys": found["keys"][rich or cut]}


def in_16_bytes(x) -> bool:
    """Whether rows begin and end at multiples of 16 bytes."""
    vector = 16 // x.element_size()
    return not any(n % vector for n in (x.shape[-1], *x.stride()[:-1]))


def sums_bias(tensors: Tensors) -> bool:
    """Whether the gradient of a bias is a sum over queries, heads or batch members."""
    q, k, bias = tensors.q, tensors.k, tensors.bias
    if tensors.bias_offsets is not None:
        return bias.shape[0] != q.shape[0]
    return bias.shape != (*q.shape[:-1], k.shape[-2]) and (bias.shape[-2] == 1 or bias.shape[-1] != 1)


def has_kernels(saved: Saved, need: int, tables: Tables = TABLES) -> bool:
    tensors = saved.tensors
    need_bias = tensors.bias is not None and bool(need & NEED_BIAS)
    return tiles_of(saved, tables) is not None and not (need_bias and sums_bias(tensors))


def shares(dout, dlse, saved: Saved, need: int) -> bool:
    """Whether kernels share P among the cotangents, and are faster for it."""
    if not has_kernels(saved, need):
        return False
    if not gains(saved):
        return False
    # A program with a whole sequence needs P once for all of its gradients.
    rows = NEED_Q | NEED_K | NEED_V
    return need & rows != rows or whole_of(tilings.small_config, saved) is None


def gains(saved: Saved) -> bool:
    """Whether rows are so narrow that sharing P pays: wider ones in registers cost more than P does, but not more than P and a dropout
    mask."""
    return max(x.shape[-1] for x in saved.tensors[:3]) <= NARROW or bool(saved.scalars.dropout_p)


def whole_of(config: Callable[..., Any], saved: Saved) -> tuple[int, ...] | None:
    """The tiles by which one program has a whole sequence of this call, as `config` of tilings.py names them; None: it does not fit."""
    q, k, v = saved.tensors[:3]
    longest = max(q.shape[-2], k.shape[-2])
    if saved.tensors.cu_seqlens_q is not None:
        longest = longest_class(saved.scalars.max_seqlen_q, saved.scalars.max_seqlen_k)
    return config(device_of(q.device).capability, q.dtype, max(q.shape[-1], v.shape[-1]), longest)


def many_backward(dout, dlse, saved: Saved, need: int):
    """dq, dk, dv, dbias, dweight for cotangents [n, *] of out and lse (None: zero), also [n, *]; those that `need` does not name are
    empty."""
    tensors, out, lse, scalars = saved
    q, k, v, bias, weight = tensors[:5]
    if not has_kernels(saved, need):
        raise BackendError(
            f"flashsci: gradients for many cotangents have no kernel here for head dims {q.shape[-1]} and {v.shape[-1]} in "
            f"{str(q.dtype).removeprefix('torch.')}, these features and gradients; compute them one after the other"
        )
    count = count_of((dout, dlse))
    found = fake_many_backward(count, tensors, need)
    dq, dk, dv = (x if need & bit else None for x, bit in zip(found, (NEED_Q, NEED_K, NEED_V), strict=False))
    dbias = found[3] if bias is not None and need & NEED_BIAS else None
    dweight = found[4] if weight is not None and need & NEED_KEY_WEIGHT else None
    if count * out.numel() * k.shape[-2] == 0:
        for x in found:
            x.zero_()
        return found
    out, lse = inner(out), lse.contiguous()
    dout = rows_of(None, out).expand(count, *out.shape) if dout is None else whole_rows(inner(dout))
    inputs = tuple(tensors)
    p = plan_of((q, k, v, dout[0], out), inputs, longest_of(scalars), options_of(scalars))
    reference, delta = deltas(p, dout, out, lse, dlse)
    use, into = NO_ROUTE[0], None
    if dbias is not None:
        use = STORE.value if bias.shape[-1] != 1 or p.size_k == 1 else ROW_SUMS.value
        into = dbias if use == STORE.value else torch.empty_like(delta)
        if p.window or p.ragged or p.tiles:  # scores that no query tile visits are not written
            dbias.zero_()
    if dq is not None or use:
        queries(p, saved, dout, delta, dq, use, into)(inputs, dout, reference, delta, dq, into)
    sums = None if dweight is None else k.new_empty((count, *k.shape[:-1]), dtype=torch.float32)
    if not (dk is dv is sums is None):
        keys(p, saved, dout, delta, dk, dv, sums)(inputs, dout, reference, delta, dk, dv, sums)
    if use == ROW_SUMS.value:
        dbias.copy_(reduce_to(into.unsqueeze(-1), dbias))
    if dweight is not None:
        dweight.copy_(reduce_to(sums, dweight))
    return found


def whole_rows(x):
    """x, or a copy whose rows begin at multiples of 16 bytes, if they end there."""
    return x if in_16_bytes(x) or x.shape[-1] * x.element_size() % 16 else x.contiguous()


def deltas(p: DensePlan, dout, out, lse, dlse):
    """References, equal in all directions, and deltas [n, *]: directions are one more batch dim of the kernel of a call."""
    count = dout.shape[0]
    rows = dout.flatten(1, 2) if dout.dim() == 6 else dout
    of_out = out.flatten(0, 1) if out.dim() == 5 else out
    key = "many_delta", count, rows.stride(), of_out.stride()
    if key not in p.launches:
        one = p.delta()
        arguments = one.arguments | {
            "sizes": p.arguments["sizes"]._replace(batch1=p.batch),
            "dout_strides": (rows.stride(0), *strides4(rows.stride()[1:])[1:]),
            "out_strides": strides4(of_out.stride()),
        }
        p.launches[key] = Launch(one.kernel, one.programs * count, arguments)
    every = lse.expand(count, *lse.shape).contiguous()
    reference, delta = torch.empty_like(every), torch.empty_like(every)
    p.launches[key](rows, of_out, every, None if dlse is None else dlse.contiguous(), reference, delta)
    return reference, delta


def scheduled(p: DensePlan, like: str, row: Row, count: int) -> tuple[int, dict]:
    """Programs for all tiles and groups of directions, and their arguments, in the order of the kernel `like` of a call."""
    _, arguments = p.scheduled(like)
    block_m, block_n, warps, stages, most = row
    by_keys = like in tilings.BY_KEYS
    # As in tilings.config: of tiles that both wgmma and mma read.
    if by_keys and (p.bias_mask or p.tiles) and p.device.capability is not None and p.device.capability >= (9, 0):
        stages = 1
    size, block = (p.size_k, block_n) if by_keys else (p.size_q, block_m)
    tiles = size // block + p.sequences + 2 if p.varlen else -(-size // block)
    group = group_of(count, most)
    schedule = arguments["schedule"]._replace(tiles=tiles)
    arguments.pop("maxnreg", None)
    arguments.update(
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, GROUP=group, schedule=schedule
    )
    return tiles * schedule.heads_total * -(-count // group), arguments


def step_of(x) -> int:
    return 0 if x is None else x.stride(0)


def row_strides(x) -> tuple[int, ...]:
    """The strides of a result with rows along one direction."""
    return strides4((0,) if x is None else x.stride()[1:])


def queries(p: DensePlan, saved: Saved, dout, delta, dq, use: int, dbias) -> Launch:
    steps = tuple(map(step_of, (dout, delta, dq, dbias)))
    key = "many_dq", dout.shape[0], steps, use
    if key not in p.launches:
        programs, arguments = scheduled(p, "dq", tiles_of(saved)["queries"], dout.shape[0])
        one = None if dbias is None else dbias[0]
        vector = p.stored_vector(one, use)
        arguments.update(
            dout_strides=p.strides[3],
            dq_strides=row_strides(dq),
            dbias_strides=p.gradient_strides(one, use),
            tiles=(dout.shape[0], steps),
            BIAS_GRADIENT=use,
            DBIAS_VECTOR=1 if steps[3] % vector else vector,
        )
        p.launches[key] = Launch(many_dq_kernel, programs, arguments)
    return p.launches[key]


def keys(p: DensePlan, saved: Saved, dout, delta, dk, dv, sums) -> Launch:
    steps = tuple(map(step_of, (dout, delta, dk, dv, sums)))
    key = "many_dkdv", dout.shape[0], steps
    if key not in p.launches:
        programs, arguments = scheduled(p, "dkdv", tiles_of(saved)["keys"], dout.shape[0])
        arguments.update(
            dout_strides=p.strides[3],
            dk_strides=row_strides(dk),
            dv_strides=row_strides(dv),
            tiles=(dout.shape[0], steps),
        )
        p.launches[key] = Launch(many_dkdv_kernel, programs, arguments)
    return p.launches[key]
