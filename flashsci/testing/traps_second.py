"""Known traps of second order, registered with those of traps.py."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

import flashsci
from flashsci.errors import BackendError
from flashsci.testing.bounds import PLAIN, Judge
from flashsci.testing.cases import Case, Variant
from flashsci.testing.evaluation import evaluate, evaluate_along, evaluate_batch, evaluate_second_batch
from flashsci.testing.inputs import Inputs
from flashsci.testing.making import make_inputs
from flashsci.testing.second_tangents import second_direction
from flashsci.testing.traps import (
    DTYPES,
    HALVES,
    each_served,
    judged,
    require,
    stays_in_its_sequence,
    trap,
)
from flashsci.testing.traps_execution import repeat_bitwise, replay_other_values

ALL = "qkvb"


@trap(order=2, one_of=("float32", *HALVES))
def second_order_of_fully_masked_rows(backend: str, device: torch.device, dtype: str) -> None:
    """A row without keys: zero second-order gradients and tangents, exactly, and no NaN anywhere."""
    variant = Variant(mask=True, bias="pair", bias_grad=True, lse_grad=True, tangents=ALL)
    case = Case(
        seed=20,
        variant=variant,
        lead=(2,),
        group=2,
        seq_q=19,
        seq_k=33,
        mask_shape=(2, 1, 19, 1),
        mask_kind="rows",
        bias_shape=(2, 19, 33),
        bias_holes=True,
    )
    none = replace(case, mask_kind="none")
    parts = (
        judged(backend, device, case, dtypes=("bfloat16", "float32")),
        judged(backend, device, none, dtypes=("float16",)),
    )
    each_served(itertools.chain(*parts))
    inputs = make_inputs(replace(case, variant=replace(variant, dtype=dtype)), device)
    found = evaluate(inputs, backend)
    assert inputs.mask is not None
    hidden = ~inputs.mask.expand(*found["lse"].shape, 1)
    assert hidden.any() and not hidden.all()
    for name in ("gq", "gdout", "tout"):
        assert found[name].masked_select(hidden).eq(0).all(), name
    for name in ("gdlse", "tlse"):
        assert found[name].masked_select(hidden[..., 0]).eq(0).all(), name


@trap(order=2, one_of=("float32", *HALVES))
def tangents_of_rows_of_numbers(backend: str, device: torch.device, dtype: str) -> None:
    """Rows whose every visible key has a bias of -1e30, some in a first tile that the window cuts.

    The tangent of lse is a mean of the scores' tangents, whatever P such rows have.
    """
    generator = torch.Generator().manual_seed(40)
    seq = 300 if device.type == "cuda" else 72
    q, k, v, tq, tk = (torch.randn(2, 2, seq, 16, generator=generator) for _ in range(5))
    bias = torch.where(torch.arange(seq) < seq // 4, 0.0, -1e30).expand(1, 2, seq, seq)
    tbias = 8 + torch.randn(1, 2, seq, seq, generator=generator)
    # Exact in every dtype: zeros, so that a score's tangent is that of its bias.
    tangents = {"tq": 0 * tq, "tk": 0 * tk, "tv": 0 * v, "tbias": tbias}
    kind = getattr(torch, dtype)
    q, k, v = (x.to(device, kind) for x in (q, k, v))
    inputs = Inputs(
        q,
        k,
        v,
        bias=bias.to(device),
        dout=torch.ones(2, 2, seq, 16, device=device, dtype=kind),
        dlse=torch.zeros(2, 2, seq, device=device),
        tangents={n: x.to(device, torch.float32 if n == "tbias" else kind) for n, x in tangents.items()},
        options={"window": (seq // 3, None)},
    )
    found = evaluate(inputs, backend)["tlse"]
    least, most = found.min().item(), found.max().item()
    low, high = tbias.min().item() - 0.1, tbias.max().item() + 0.1
    assert low <= least and most <= high, (
        f"tangents of lse are {least:.3g} to {most:.3g}; those of the scores {low:.3g} to {high:.3g}"
    )


@trap(order=2, one_of=("float32", *HALVES))
def second_order_of_empty_and_single(backend: str, device: torch.device, dtype: str) -> None:
    """Sq, Sk 0 and 1, packed sequences of length 0."""
    plain = Case(seed=21, variant=Variant(tangents="qkv", lse_grad=True), lead=(2,), heads_k=2)
    packed = replace(plain, variant=replace(plain.variant, varlen=True), rank=3, lead=())
    sizes = (0, 5), (5, 0), (1, 1), (1, 40), (40, 1)
    dense = [replace(plain, seq_q=a, seq_k=b) for a, b in sizes]
    lens = ((0, 5, 0), (7, 0, 0)), ((0,), (0,)), ((3, 0), (4, 5))
    cases = [*dense, *(replace(packed, lens_q=a, lens_k=b) for a, b in lens)]
    require(backend, device, *cases, dtypes=(dtype,))


@trap(order=2)
def second_order_of_a_common_shift(backend: str, device: torch.device) -> None:
    """Tangents of scores far from zero but nearly equal within a row: softmax only sees the difference."""
    variant = Variant(bias="pair", bias_grad=True, tangents="kb", head_dim=32, head_dim_v=32)
    case = Case(seed=22, variant=variant, lead=(2,), seq_q=33, seq_k=90, bias_shape=(2, 1, 33, 90))
    require(backend, device, replace(case, tangent_magnitude="offset"))


@trap(order=2, one_of=("float32", *HALVES))
def forward_mode_over_forward_mode(backend: str, device: torch.device, dtype: str) -> None:
    """Tangents of tangents: dense with a bias, causal with a softcap, packed, of key weights, and of few tensors."""
    plain = Variant(dtype=dtype, head_dim=64, head_dim_v=64, tangents="qkv")
    case = Case(seed=28, variant=plain, lead=(2,), heads_k=2, group=2, seq_q=75, seq_k=130)
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (
            {"bias": "pair", "bias_grad": True, "tangents": ALL, "dropout": True},
            {"bias_shape": (2, 1, 75, 130), "dropout_p": 0.2},
        ),
        ({"window": True, "softcap": True}, {"causal": True, "softcap": 3.0}),
        ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 3), "lens_k": (33, 5, 90)}),
        ({"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"}, {"weight_shape": (2, 1, 130)}),
        ({"tangents": "qv"}, {}),
    ]
    for of_variant, of_case in variants:
        inputs = make_inputs(replace(case, variant=replace(plain, **of_variant), **of_case), device)
        inputs = replace(inputs, twice=True)
        found = evaluate(inputs, backend)
        Judge(inputs, backend not in PLAIN).require({n: found[n] for n in ("tuout", "tulse")})


@trap(order=2, one_of=("float32", *HALVES))
def forward_mode_along_many_directions(backend: str, device: torch.device, dtype: str) -> None:
    """Tangents under vmap: dense with a bias, causal with a softcap, packed, of key weights, of few tensors, of wide heads."""
    plain = Variant(dtype=dtype, head_dim=32, head_dim_v=32, tangents="qkv")
    case = Case(seed=29, variant=plain, lead=(2,), heads_k=2, group=2, seq_q=75, seq_k=130)
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (
            {"bias": "pair", "bias_grad": True, "tangents": ALL, "dropout": True},
            {"bias_shape": (2, 1, 75, 130), "dropout_p": 0.2},
        ),
        ({"window": True, "softcap": True, "head_dim": 64, "head_dim_v": 48}, {"causal": True, "softcap": 3.0}),
        ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 3), "lens_k": (33, 5, 90)}),
        ({"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"}, {"weight_shape": (2, 1, 130)}),
        ({"mask": True, "tangents": "kv"}, {"mask_shape": (2, 1, 75, 130)}),
        ({"tangents": "qv", "head_dim": 128}, {}),
    ]
    for of_variant, of_case in variants:
        inputs = make_inputs(replace(case, variant=replace(plain, **of_variant), **of_case), device)
        directions = [inputs.tangents, *second_direction(inputs.tangents)]
        found = evaluate_along(inputs, backend, directions)
        for tangents, results in zip(directions, found, strict=True):
            Judge(replace(inputs, tangents=tangents), backend not in PLAIN).require(results)


@trap(order=2, one_of=("float32", *HALVES))
def gradients_for_many_cotangents(backend: str, device: torch.device, dtype: str) -> None:
    """Gradients under vmap: dense with a bias, causal with a softcap, packed, of key weights, of lse, of a shared bias, of wide heads."""
    plain = Variant(dtype=dtype, head_dim=32, head_dim_v=32)
    case = Case(seed=30, variant=plain, lead=(2,), heads_k=1, group=2, seq_q=70, seq_k=66)
    pair: dict[str, Any] = {"bias": "pair", "bias_grad": True}
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"lse_grad": True}, {}),
        (pair | {"dropout": True}, {"bias_shape": (2, 2, 70, 66), "dropout_p": 0.2}),
        (pair, {"bias_shape": (2, 1, 70, 66)}),
        ({"window": True, "softcap": True, "head_dim": 64, "head_dim_v": 48}, {"causal": True, "softcap": 3.0}),
        ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 3), "lens_k": (33, 5, 90)}),
        ({"key_weight": "float", "key_weight_grad": True}, {"weight_shape": (2, 1, 66)}),
        ({"mask": True}, {"mask_shape": (2, 1, 70, 66)}),
        ({"head_dim": 128, "head_dim_v": 128}, {}),
    ]
    for of_variant, of_case in variants:
        inputs = make_inputs(replace(case, variant=replace(plain, **of_variant), **of_case), device)
        first = inputs.dout, inputs.dlse
        cotangents = [[None if x is None else x.roll(n, -1) for x in first] for n in range(3)]
        found = evaluate_batch(inputs, backend, cotangents)
        for (dout, dlse), results in zip(cotangents, found, strict=True):
            Judge(replace(inputs, dout=dout, dlse=dlse), backend not in PLAIN).require(results)


@trap(order=2, one_of=("float32", *HALVES))
def second_gradients_along_many_directions(backend: str, device: torch.device, dtype: str) -> None:
    """Second derivatives under vmap, reverse and forward over reverse: dense with a bias, causal with a softcap, packed, of key weights, of
    few tensors, of a shared bias, of wide heads."""
    plain = Variant(dtype=dtype, head_dim=32, head_dim_v=32, tangents="qkv")
    case = Case(seed=31, variant=plain, lead=(2,), heads_k=1, group=2, seq_q=70, seq_k=66)
    pair: dict[str, Any] = {"bias": "pair", "bias_grad": True, "tangents": ALL}
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"lse_grad": True}, {}),
        (pair | {"dropout": True}, {"bias_shape": (2, 2, 70, 66), "dropout_p": 0.2}),
        (pair, {"bias_shape": (2, 1, 70, 66)}),
        ({"window": True, "softcap": True, "head_dim": 64, "head_dim_v": 48}, {"causal": True, "softcap": 3.0}),
        ({"varlen": True}, {"rank": 3, "lead": (), "lens_q": (70, 0, 3), "lens_k": (33, 5, 90)}),
        ({"key_weight": "float", "key_weight_grad": True, "tangents": "qkvw"}, {"weight_shape": (2, 1, 66)}),
        ({"mask": True, "tangents": "kv"}, {"mask_shape": (2, 1, 70, 66)}),
        ({"tangents": "qv", "head_dim": 128, "head_dim_v": 128}, {}),
    ]
    for number, (of_variant, of_case) in enumerate(variants):
        inputs = make_inputs(replace(case, variant=replace(plain, **of_variant), **of_case), device)
        directions = [inputs.tangents, *second_direction(inputs.tangents)]
        found = evaluate_second_batch(inputs, backend, directions, forward=number % 2 == 1)
        for tangents, results in zip(directions, found, strict=True):
            Judge(replace(inputs, tangents=tangents), backend not in PLAIN).require(results)


@trap(order=2)
def gradients_of_inputs_that_depend_on_each_other(backend: str, device: torch.device) -> None:
    """q, k and v that are one tensor, and k, v, bias and sink that are computed from q.

    A recorded backward must not count the effect of one on another as its own.
    """
    generator = torch.Generator().manual_seed(25)
    x = torch.randn(1, 2, 12, 12, generator=generator)
    served = 0
    for tied, with_sink in itertools.product((True, False), repeat=2):
        found = []
        for name, dtype in (("reference", torch.float64), (backend, torch.float32)):
            leaf = x.to(device, dtype).requires_grad_()
            others: dict[str, Any] = {} if tied else {"bias": leaf.cos()}
            if with_sink:
                others["sink"] = leaf.mean((0, 2, 3))
            k, v = (leaf, leaf) if tied else (leaf.sin(), leaf.square())
            try:
                with flashsci.use_backend(name, strict=True):
                    out = flashsci.attention(leaf, k, v, backend=name, **others)
            except BackendError:  # no sink
                continue
            (first,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), leaf)
            found.append((first.detach(), second))
        for got, true in zip(*found[::-1], strict=True) if len(found) == 2 else ():
            served += 1
            torch.testing.assert_close(got.double(), true.double(), rtol=1e-3, atol=1e-3)
    if not served:
        raise BackendError(f"backend {backend!r} serves none of these calls")


@trap(order=2)
def nan_stays_in_its_packed_sequence_to_second_order(backend: str, device: torch.device) -> None:
    case = Case(seed=23, variant=Variant(varlen=True, tangents="qkv"))
    dtypes = DTYPES if device.type == "cuda" else ("bfloat16", "float32")
    stays_in_its_sequence(backend, device, case, dtypes)


@trap(order=2, slow=True, one_of=("float32", *HALVES))
def second_order_of_seventy_thousand_batch_heads(backend: str, device: torch.device, dtype: str) -> None:
    variant = Variant(dtype, head_dim=8, head_dim_v=8, bias="key", bias_grad=True, tangents=ALL)
    case = Case(seed=24, variant=variant, lead=(17500,), heads_k=4, seq_q=3, seq_k=5)
    inputs = make_inputs(replace(case, bias_shape=(17500, 1, 1, 5)), device)
    found = evaluate(inputs, backend)
    some = torch.tensor([0, 1, 8000, 16383, 16384, 17499], device=device)
    few = {n: getattr(inputs, n).detach()[some] for n in ("q", "k", "v", "bias", "dout")}
    few["tangents"] = {n: x[some] for n, x in inputs.tangents.items()}
    Judge(replace(inputs, **few)).require({n: x[some] for n, x in found.items()})


@trap(order=2, cuda=True, gigabytes=20, slow=True, one_of=HALVES)
def second_order_of_strides_beyond_two_billion(backend: str, device: torch.device, dtype: str) -> None:
    buffer = torch.full((2**31 + 2**20,), torch.nan, device=device, dtype=getattr(torch, dtype))
    for strides in ((2**31, 2**14, 64, 1), (2**15, 2**14, (2**31 - 2**16) // 70, 1)):
        x = buffer.as_strided((2, 2, 70, 64), strides)
        x.copy_(torch.randn(2, 2, 70, 64, device=device))
        y = torch.randn(2, 2, 70, 64, device=device, dtype=x.dtype)
        for inputs in (
            Inputs(x, y, y, dout=y, tangents={"tk": x, "tq": y, "tv": y}),
            Inputs(y, x, x, dout=x, tangents={"tq": x, "tv": x}),
        ):
            Judge(inputs).require(evaluate(inputs, backend))
        buffer.fill_(torch.nan)


@trap(order=2, cuda=True, one_of=HALVES)
def second_order_takes_no_quadratic_memory(backend: str, device: torch.device, dtype: str) -> None:
    """Forward, backward and double backward of 8192 x 8192 scores within 24 tensors like q: 1/85 of one fp32 score tensor."""
    import flashsci

    q, k, v, dout = torch.randn(4, 1, 4, 8192, 64, device=device, dtype=getattr(torch, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = flashsci.attention(q, k, v, backend=backend)
    first = torch.autograd.grad(out, inputs, dout, create_graph=True)
    torch.autograd.grad(torch.stack([x.float().square().sum() for x in first]).sum(), inputs)
    peak = torch.cuda.max_memory_allocated(device) - before
    assert peak < 24 * q.numel() * q.element_size(), f"{peak / 2**20:.0f} MiB"


@trap(order=2, cuda=True, one_of=HALVES)
def second_order_in_a_cuda_graph(backend: str, device: torch.device, dtype: str) -> None:
    variant = Variant(dtype=dtype, head_dim=64, head_dim_v=64, tangents="qkv")
    case = Case(seed=25, variant=variant, heads_k=2, group=2, seq_q=130, seq_k=130)
    replay_other_values(case, backend, device)


@trap(order=2, slow=True, one_of=HALVES)
def second_order_repeats_bitwise(backend: str, device: torch.device, dtype: str) -> None:
    """The same bits, run after run: every second-order gradient and tangent."""
    runs = 10 if device.type == "cuda" else 2
    variant = Variant(dtype=dtype, head_dim=64, head_dim_v=64, lse_grad=True, tangents="qkv")
    dense = Case(seed=27, variant=variant, lead=(3,), heads_k=2, group=2, seq_q=257, seq_k=300)
    biased = replace(variant, bias="pair", bias_grad=True, bias_float=True, dropout=True, tangents=ALL)
    lens: dict[str, Any] = {"lens_q": (200, 3, 90), "lens_k": (40, 130, 90)}
    cases = [
        dense,
        replace(dense, variant=replace(variant, varlen=True), rank=3, lead=(), **lens),
        *(
            replace(dense, variant=biased, bias_shape=shape, dropout_p=0.2)
            for shape in ((1, 1, 257, 300), (3, 1, 1, 300), (4, 1, 1), (3, 4, 257, 300))
        ),
    ]
    repeat_bitwise(cases, backend, device, runs)
