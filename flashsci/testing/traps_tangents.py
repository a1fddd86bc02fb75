"""Known traps of forward mode and of results that overlap inputs: a tangent without a rule, out= over q. Registered
in traps.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashsci
from flashsci.errors import BackendError
from flashsci.testing.paged import PagedCase, PagedVariant, make_paged_inputs
from flashsci.testing.traps import trap

STEP = 2.0**-6
# Tolerances for central differences in fp32 and, in 16 bits and 8, for their own roundings: they tell a tangent from
# none.
TOLERANCE = 0.05


def carried_or_refused(what: str, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Require that the tangent of ``call(x)`` along ones is that of central differences, or that forward mode raises
    an error."""
    ones = torch.ones_like(x)
    truth = (call(x + STEP * ones) - call(x - STEP * ones)).float() / (2 * STEP)
    try:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, ones))).tangent
    except (BackendError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return
    found = torch.zeros_like(truth) if tangent is None else tangent.float()
    error, size = (found - truth).abs().max().item(), truth.abs().max().item()
    assert error <= TOLERANCE * size, (
        f"forward mode over {what}: the tangent is off by {error:.3g} of {size:.3g}, and no error"
    )


@trap()
def forward_mode_over_every_tensor(backend: str, device: torch.device) -> None:
    """Slopes, sinks, weights and biases, dense and packed: a tangent is carried or refused, never dropped."""
    generator = torch.Generator().manual_seed(51)
    q, k, v = torch.randn(3, 1, 2, 24, 16, generator=generator).to(device)
    q1, k1, v1 = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    offsets = torch.tensor([0, 10, 24], dtype=torch.int32, device=device)
    tensors = {
        "alibi_slopes": torch.tensor([0.5, 0.25]),
        "sink": torch.tensor([0.3, -0.2]),
        "bias": torch.randn(1, 2, 24, 24, generator=generator),
        "key_weight": 0.5 + torch.rand(1, 2, 24, generator=generator),
    }

    for name, given in tensors.items():

        def dense(x: Tensor, name: str = name) -> Tensor:
            given: dict[str, Any] = {name: x}
            return flashsci.attention(q, k, v, backend=backend, **given)

        def ragged(x: Tensor, name: str = name) -> Tensor:
            given: dict[str, Any] = {name: x}
            return flashsci.varlen_attention(q1, k1, v1, offsets, backend=backend, **given)

        given = given.to(device)
        # A number that is added to all scores of a row, or multiplies all of its weights, changes nothing.
        direction = (torch.arange(given.shape[-1], device=device) % 3 / 2).expand(given.shape)
        calls = [dense] if name in ("bias", "key_weight") else [dense, ragged]
        for call in calls:
            along = lambda t, c=call, g=given, d=direction: c(g + t * d)  # noqa: E731
            try:
                call(given)
            except BackendError:
                continue
            carried_or_refused(name, along, torch.zeros((), device=device))


@trap()
def forward_mode_of_paged_calls(backend: str, device: torch.device) -> None:
    """Queries, caches and sinks of paged attention: a tangent is carried or refused, never dropped."""
    variant = PagedVariant(sink=True)
    inputs = make_paged_inputs(PagedCase(variant, seed=4, lens_q=(3,), lens_k=(20,)), device)
    q, k_cache, v_cache = (torch.nan_to_num(x) for x in (inputs.q, inputs.k_cache, inputs.v_cache))
    options: dict[str, Any] = inputs.options | {
        "sink": torch.zeros_like(inputs.options["sink"]),
        "backend": backend,
    }
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sink": options["sink"]}

    for name in tensors:

        def call(x: Tensor, name: str = name) -> Tensor:
            given: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | options | {name: x}
            return flashsci.paged_attention(**given)

        carried_or_refused(f"{name} of paged_attention", call, tensors[name])


@trap()
def out_of_a_paged_call_over_its_queries(backend: str, device: torch.device) -> None:
    """``out=q``, or a part of q: an error, or the result of a separate out."""
    inputs = make_paged_inputs(PagedCase(seed=5, lens_q=(3, 1), lens_k=(20, 7)), device)
    q, k_cache, v_cache = inputs.q.contiguous(), inputs.k_cache, inputs.v_cache
    options: dict[str, Any] = inputs.options | {"backend": backend}
    truth = flashsci.paged_attention(q, k_cache, v_cache, **options)
    try:
        flashsci.paged_attention(q, k_cache, v_cache, out=q, **options)
    except (ValueError, RuntimeError, BackendError):
        return
    assert torch.equal(q, truth), "out= over q is accepted, and its result is another"
