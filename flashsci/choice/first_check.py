"""The first call on a GPU on which no kernel of the library has run: one small problem of each family, against fp64.

It runs once per machine, takes less than a second, and warns of a family that fails. FLASHSCI_FIRST_CHECK=0 leaves it
out. `python -m flashsci check` examines everything, in minutes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashsci import cached
from flashsci.backends import cuda
from flashsci.call.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, Saved, Scalars, Tensors
from flashsci.call.paged_ops import PagedScalars, PagedTensors
from flashsci.choice.backends import PAGED, find
from flashsci.errors import BackendError

SWITCH = "FLASHSCI_FIRST_CHECK"
_lock = threading.Lock()

Results = dict[str, Tensor]
#: The results of a backend, with floating tensors in the dtype given (None: their own), which is that of the truth.
Family = Callable[[str, torch.dtype | None], Results]
DIM = 64


def families(capability: tuple[int, int], device: torch.device) -> dict[str, tuple[torch.dtype, Family]]:
    """One small problem of each family of the library's kernels that a GPU runs: its dtype and results, by name."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    found = {
        "fp16": (half, _dense(half, device)),
        "fp16, bias": (half, _dense(half, device, bias=True)),
        "fp16, packed": (half, _packed(half, device)),
    }
    if capability >= (8, 0):
        found |= {
            "bf16": (brain, _dense(brain, device)),
            "bf16, mask": (brain, _dense(brain, device, mask=True)),
            "fp32": (single, _dense(single, device)),
            "fp32, few keys": (single, _dense(single, device, keys=24)),
            "fp16, paged": (half, _paged(half, device)),
        }
    return found


class Draw:
    """Normal numbers of a fixed seed; no generator of the program is touched."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32).to(
            self.device, self.dtype
        )


def _dense(dtype: torch.dtype, device: torch.device, bias: bool = False, mask: bool = False, keys: int = 72) -> Family:
    draw, rows = Draw(dtype, device), min(40, keys)
    q, dout = draw(2, 4, rows, DIM), draw(2, 4, rows, DIM)
    k, v = draw(2, 2, keys, DIM), draw(2, 2, keys, DIM)
    added = draw(2, 4, rows, keys) if bias else None
    visible = draw(2, 1, rows, keys) > -1 if mask else None
    tensors = Tensors(q, k, v, bias=added, mask=visible)
    return _both_passes(tensors, dout, _scalars(-1 if bias or mask else 0))


def _packed(dtype: torch.dtype, device: torch.device) -> Family:
    draw = Draw(dtype, device)
    q, k, v, dout = (draw(2, 90, DIM) for _ in range(4))
    offsets = torch.tensor([0, 20, 20, 90], dtype=torch.int32, device=device)
    return _both_passes(Tensors(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets), dout, _scalars(0, longest=70))


def _scalars(window_right: int, longest: int = -1) -> Scalars:
    return Scalars(longest, longest, DIM**-0.5, 0.0, -1, window_right, False, 0.0, "default", False)


def _both_passes(tensors: Tensors, dout: Tensor, scalars: Scalars) -> Family:
    """Forward and, where the backend has it, backward."""

    def results(backend: str, dtype: torch.dtype | None) -> Results:
        module, given, cotangent = find(backend).load(), Tensors(*_cast(tensors, dtype)), _cast((dout,), dtype)[0]
        out, lse = module.forward(given, scalars)
        found = {"out": out, "lse": lse}
        need = NEED_Q | NEED_K | NEED_V | (0 if given.bias is None else NEED_BIAS)
        try:
            gradients = module.backward(cotangent, None, Saved(given, out, lse, scalars), need)
        except BackendError:  # another backend computes this one's gradients
            return found
        wanted = ("dq", "dk", "dv", "dbias")[: 3 if given.bias is None else 4]
        return found | dict(zip(wanted, gradients, strict=False))

    return results


def _paged(dtype: torch.dtype, device: torch.device) -> Family:
    draw = Draw(dtype, device)
    q, cache_k, cache_v = draw(4, 4, DIM), draw(4, 16, 2, DIM), draw(4, 16, 2, DIM)
    table, used, offsets = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0], [1, 3]], [30, 17], [0, 1, 4])
    )

    def results(backend: str, dtype: torch.dtype | None) -> Results:
        query, keys, values = _cast((q, cache_k, cache_v), dtype)
        out = torch.empty_like(query)
        given = PagedTensors(query, keys, values, table, used, offsets, None, None, None)
        scalars = PagedScalars(3, DIM**-0.5, 0.0, -1, 0, True)
        return {"out": out, "lse": find(backend).kernels(PAGED).attention(given, out, scalars)}

    return results


def _cast(tensors: tuple[Any, ...], dtype: torch.dtype | None) -> list[Any]:
    floating = lambda x: x is not None and x.is_floating_point()  # noqa: E731
    return [x.to(dtype) if dtype is not None and floating(x) else x for x in tensors]


def faults(dtype: torch.dtype, family: Family, backend: str) -> list[str]:
    """The results of a backend that are further from the truth than twice plain PyTorch in the same dtype, and a floor:
    one rounding of the largest number to the dtype, and those of its sum in fp32, which add up as a random walk."""
    truth, plain = family("reference", torch.float64), family("reference", None)
    found = []
    for name, x in family(backend, None).items():
        due = truth[name]
        error, of_plain = ((y.double() - due).abs().max().item() for y in (x, plain[name]))
        roundings = torch.finfo(dtype).eps + math.sqrt(DIM) * torch.finfo(torch.float32).eps
        floor = roundings * due.abs().max().item()
        if not error <= 2 * of_plain + floor:  # NaN is no number at most that
            found.append(f"{name}: the largest error is {error:.3g}, that of plain PyTorch {of_plain:.3g}")
    return found


def run(capability: tuple[int, int], device: torch.device, backend: str = "cuda") -> dict[str, str]:
    """The families that fail, each with its first fault."""
    found = {}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for name, (dtype, family) in families(capability, device).items():
            try:
                wrong = faults(dtype, family, backend)
            except Exception as error:  # a kernel that cannot be launched has failed
                wrong = [f"{type(error).__name__}: {error}"]
            if wrong:
                found[name] = wrong[0]
    return found


def look(capability: tuple[int, int]) -> bool:
    """Check a GPU of the process once per machine, and warn of failures. False: not now, because a compiler, a graph
    or a transform would see it."""
    if os.environ.get(SWITCH) == "0":
        return True
    every = range(torch.cuda.device_count())
    index = next((i for i in every if torch.cuda.get_device_capability(i) == capability), None)
    if index is None:  # a decision about a GPU that is not here
        return True
    if _observed():
        return False
    with _lock, torch.cuda.device(index):
        name = torch.cuda.get_device_name(index)
        failures = remembered(key(name), lambda: run(capability, torch.device("cuda", index)))
    if failures:
        lines = "".join(f"\n  {family}: {fault}" for family, fault in failures.items())
        warnings.warn(
            f"flashsci: on this {name} (sm_{capability[0]}{capability[1]}) kernels of the cuda backend fail their first check:{lines}\n"
            "Use backend='triton' or 'sdpa' for such calls, and please report this with the output of `python -m flashsci env`. "
            f"({SWITCH}=0 leaves the check out.)",
            stacklevel=2,
        )
    return True


def _observed() -> bool:
    """Whether a compiler, a graph, a mode or a transform would take part in the check."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or torch.cuda.is_current_stream_capturing()
    )


def key(gpu: str) -> str:
    """The GPU, the kernels and the torch for which an outcome holds."""
    built = json.dumps(cuda.build_info(), sort_keys=True)
    return f"{gpu}, {hashlib.sha256(built.encode()).hexdigest()[:16]}, torch {torch.__version__}"


def cache() -> Path:
    return cached.folder() / "first_check.json"


def remembered(key: str, check: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The outcome for a key, from the cache of the machine if it is there. Without a cache the check runs in every
    process."""
    path = cache()
    try:
        known = cached.entries(path).get(key)
    except ValueError:  # a damaged file, which is written anew
        known = None
    if isinstance(known, dict) and isinstance(known.get("failures"), dict):
        outcome: dict[str, str] = known["failures"]
        return outcome
    start = time.monotonic()
    failures = check()
    entry = {"failures": failures, "seconds": round(time.monotonic() - start, 2)}
    try:
        cached.update(path, lambda entries: entries | {key: entry})
    except OSError as error:  # the next process checks again
        warnings.warn(
            f"flashsci: the first check of this GPU cannot be kept in {path} ({error}); "
            f"set {cached.FOLDER} or XDG_CACHE_HOME to a folder that can be written",
            stacklevel=2,
        )
    return failures
