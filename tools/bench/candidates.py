"""The candidates for a case: flashsci's backends, those of another revision, and its peers.

A candidate turns the inputs of a case into a function of no arguments that returns the output, or
raises `Unsupported` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashsci
from flashsci.choice import backends
from tools.bench import fa3, peers, revision
from tools.bench.cases import BenchError
from tools.bench.inputs import Inputs, Unsupported

OURS = (*backends.REQUESTS, "auto")
BASELINES = (
    *(f"sdpa:{kernel}" for kernel in peers.SDPA_KERNELS),
    *("math", "flex", "fa3", "cueq", "turbo"),
)
BASE = "@base"  # ends the names of the backends of another revision


def is_ours(name: str) -> bool:
    """Whether the candidate is a backend of flashsci; tools/kernels/launchers.py adds builds of single kernels to them."""
    return name in OURS or name in backends.BACKENDS


def names_of(chosen: Iterable[str], device: torch.device, base: bool = False) -> list[str]:
    """Candidates by name, with the groups "ours", "baselines" and "choices"; without names the first two, as
    the device has them. `base` adds ours of the other revision, next to their namesakes."""
    ours = ["triton", "cuda"] if device.type == "cuda" else ["reference", "sdpa"]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        ours.append("cuda:sm80")  # GPUs before this one get these
    sdpa = [f"sdpa:{kernel}" for kernel in peers.SDPA_KERNELS if kernel not in ("default", "math")]
    groups = {
        # The candidates of `auto`, and those that its choice is compared with.
        "choices": ["cuda", "cuda:own", "triton", "sdpa", "eager", *sdpa]
        if device.type == "cuda"
        else ["sdpa", "eager"],
        "ours": ours,
        "baselines": list(BASELINES) if device.type == "cuda" else ["sdpa:default", "sdpa:math", "math"],
    }
    names: dict[str, None] = {}
    for name in chosen or ("ours", "baselines"):
        for member in groups.get(name, [name]):
            names[member] = None
            if base and is_ours(member):
                names[member + BASE] = None
    unknown = [n for n in names if not is_ours(n.removesuffix(BASE)) and n not in BASELINES]
    if unknown:
        known = ", ".join((*groups, *OURS, *BASELINES))
        raise BenchError(f"no candidate named {unknown[0]!r}; there are {known}")
    return list(names)


def package_of(name: str) -> tuple[Any, str]:
    """Whether the candidate of this name is from the other revision or this one, and its name there."""
    if name.endswith(BASE):
        return revision.current().package, name.removesuffix(BASE)
    return flashsci, name


def candidate(name: str, inputs: Inputs) -> Callable[[], Tensor]:
    """The forward of `name` on these inputs, as a function without arguments."""
    package, backend = package_of(name)
    if is_ours(backend):
        try:
            return _ours(package, backend, inputs)
        except (ValueError, TypeError) as error:
            if package is flashsci:
                raise
            raise Unsupported(str(error)) from error  # features that it did not have yet
    if name.startswith("sdpa:"):
        return peers.sdpa(name.removeprefix("sdpa:"), inputs)
    others = {
        "math": peers.plain_math,
        "flex": peers.flex,
        "cueq": peers.cuequivariance,
        "turbo": peers.turbopairformer,
        "fa3": fa3.candidate,
    }
    return others[name](inputs)


def _ours(package, name: str, x: Inputs) -> Callable[[], Tensor]:
    options = {"bias": x.bias, "causal": x.case.causal, "window": x.case.window, "backend": name}
    if x.cu_seqlens is None:
        call = partial(package.attention, x.q, x.k, x.v, mask=x.mask, **options)
    else:
        longest = {"max_seqlen_q": max(x.case.lens), "max_seqlen_k": max(x.case.lens)}
        call = partial(package.varlen_attention, x.q, x.k, x.v, x.cu_seqlens, **longest, **options)
    try:
        # One strict call is enough, and keeps `use_backend` out of host timings: the choice is cached.
        with package.use_backend(name, strict=True):
            call()
    except package.BackendError as error:
        why = str(error).removeprefix(f"backend {name!r} cannot serve this call: ")
        raise Unsupported(why.split("; these can:")[0]) from error
    return call
