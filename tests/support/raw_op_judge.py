"""Calls of raw ops that are wrong in one argument, in memory with guards, and what is to be said against an op that takes them."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashsci.testing.poison import GUARD, poison_value
from tests.support.raw_op_calls import E4M3, RAISES, Arguments, Results, Right, schema_of

# --- one argument wrong -------------------------------------------------------------------------


class Wrong(NamedTuple):
    """What one argument of a right call is replaced by; or that of another, in whose memory it then lies."""

    argument: str
    what: str
    make: Callable[[Arguments], Any]
    same: bool = False  # it holds the numbers of the right one
    contents: bool = False  # it fits, and holds numbers that cannot be: nobody reads them on the host


def other_dtypes(x: Tensor) -> list[torch.dtype]:
    if x.dtype == torch.bool:
        return [torch.uint8, torch.float32]
    if x.is_floating_point():
        found = [torch.float64, torch.float16, torch.bfloat16, torch.float32, torch.int32, E4M3]
    else:
        found = [torch.int64, torch.int32, torch.float32]
    return [d for d in found if d != x.dtype]


def longer(x: Tensor, dim: int) -> Tensor:
    return (
        torch.cat([x.view(torch.uint8), x.narrow(dim, 0, 1).view(torch.uint8)], dim).view(x.dtype)
        if x.dtype.itemsize == 1
        else torch.cat([x, x.narrow(dim, 0, 1)], dim)
    )


def strided(x: Tensor) -> Tensor:
    """The same numbers with junk between those of a row."""
    odd = torch.full(
        (*x.shape, 2),
        poison_value(x.dtype),
        device=x.device,
        dtype=torch.float32 if x.dtype.itemsize == 1 and x.dtype != torch.bool else x.dtype,
    ).to(x.dtype)
    view = odd[..., 1]
    view.copy_(x)
    return view


def laid_in(x: Tensor, host: Tensor, offset: int) -> Tensor | None:
    """A tensor of x's shape and dtype in the memory of another, from an element on; None: there is no room."""
    if host.dtype.itemsize != x.dtype.itemsize or host.numel() < x.numel() + offset:
        return None
    flat = host.view(x.dtype) if host.dtype != x.dtype else host
    return flat.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), flat.storage_offset() + offset)


NUMBERS = {
    "scale": (math.nan, math.inf, -math.inf, 0.0, -0.5, 1e300),
    "softcap": (math.nan, math.inf, 0.0, -1.0, 1e300),
    "dropout_p": (math.nan, math.inf, 1.0, -0.5),
}
INTEGERS = {
    "window_left": (-2, -(2**40), 2**40, 0),
    "window_right": (-2, -(2**40), 2**40, 0),
    "max_seqlen_q": (-7, 2**40),
    "max_seqlen_k": (-7, 2**40),
    "need": (0, 1),
}


def wrong_calls(right: Right, given: Arguments, device: str) -> Iterator[Wrong]:
    """All of them; tensors are made when they are asked for."""
    elsewhere = "meta" if device == "cpu" else "cpu"
    for argument in schema_of(right.op).arguments:
        name, value = argument.name, given[argument.name]
        if isinstance(value, Tensor):
            of = functools.partial(Wrong, name)
            for dtype in other_dtypes(value):
                yield of(f"dtype {dtype}", lambda a, n=name, d=dtype: a[n].to(d))
            yield of(f"device {elsewhere}", lambda a, n=name: a[n].to(elsewhere))
            yield of("one dim more", lambda a, n=name: a[n][None])
            yield of("None", lambda a: None)
            if value.dim():
                yield of("one dim less", lambda a, n=name: a[n][0])
                yield of("stride 2", lambda a, n=name: strided(a[n]), True)
            if name in right.written:
                yield of("expanded", lambda a, n=name: a[n][..., :1].expand(a[n].shape))
            for dim, size in enumerate(value.shape):
                if size:
                    yield of(f"dim {dim} shorter", lambda a, n=name, d=dim: a[n].narrow(d, 0, a[n].shape[d] - 1))
                    yield of(f"dim {dim} longer", lambda a, n=name, d=dim: longer(a[n], d))
                    yield of(f"dim {dim} empty", lambda a, n=name, d=dim: a[n].narrow(d, 0, 0))
            if name.endswith("_scale"):
                for x in (math.nan, math.inf, 0.0, -1.0):
                    yield of(f"full of {x}", lambda a, n=name, x=x: torch.full_like(a[n], x), contents=True)
            if value.dtype in (torch.int32, torch.int64) and name != "dropout_seed":
                info = torch.iinfo(value.dtype)
                for x in (info.min, -1, info.max):
                    yield of(f"full of {x}", lambda a, n=name, x=x: torch.full_like(a[n], x), contents=True)
                yield of("backwards", lambda a, n=name: a[n].flip(-1), contents=True)
        elif isinstance(value, float) and name in NUMBERS:
            for x in NUMBERS[name]:
                yield Wrong(name, str(x), lambda a, x=x: x)
        elif isinstance(value, int) and name in INTEGERS:
            for x in INTEGERS[name]:
                yield Wrong(name, str(x), lambda a, x=x: x)
        elif name == "precision":
            yield Wrong(name, "fp64", lambda a: "fp64")
        elif name == "out_dtype":
            for dtype in (torch.float32, torch.int8, E4M3):
                yield Wrong(name, str(dtype), lambda a, d=dtype: d)
        elif name == "generation":
            yield Wrong(name, "42", lambda a: 42)
    for written in right.written:
        for name, x in given.items():
            if name != written and isinstance(x, Tensor):
                for offset in (0, 3):
                    yield Wrong(
                        written,
                        f"in {name} from {offset}",
                        lambda a, n=name, w=written, o=offset: laid_in(a[w], a[n], o),
                    )


# --- memory with guards -------------------------------------------------------------------------


class Guarded:
    """Tensors in the middle of poison, and what their memory held before a call."""

    def __init__(self, given: Arguments) -> None:
        kept: dict[int, Tensor] = {}
        self.given = {}
        for name, x in given.items():
            self.given[name] = x
            if isinstance(x, Tensor) and x.device.type != "meta":
                base = x.untyped_storage().data_ptr()
                if base not in kept:
                    kept[base] = self.bytes_of(x).clone()
        self.before = kept

    @staticmethod
    def bytes_of(x: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())

    def changed(self, written: tuple[str, ...]) -> list[str]:
        """Tensors in whose memory a byte has changed that does not belong to what is written."""
        found = []
        for name, x in self.given.items():
            if not isinstance(x, Tensor) or x.device.type == "meta":
                continue
            now = self.bytes_of(x).clone()
            before = self.before[x.untyped_storage().data_ptr()]
            for w in written:
                y = self.given[w]
                if y is not None and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    _as(now, y).copy_(_as(before, y))
            if not torch.equal(now, before):
                found.append(name)
        return found


def _as(memory: Tensor, like: Tensor) -> Tensor:
    """The bytes of a storage as a tensor that lies there."""
    raw = memory.view(torch.uint8 if like.dtype.itemsize == 1 else like.dtype)
    return raw.as_strided(like.shape, like.stride(), like.storage_offset())


def guarded(given: Arguments) -> Arguments:
    """The same call, each tensor in the middle of memory of its own; tensors that share memory go on doing so."""
    homes: dict[int, tuple[Tensor, Tensor]] = {}
    made: Arguments = {}
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.device.type == "meta":
            made[name] = x
            continue
        base = x.untyped_storage().data_ptr()
        if base not in homes or x.numel() == 0:
            flat = Guarded.bytes_of(x)
            room = torch.full((flat.numel() + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=x.device)
            room[GUARD:][: flat.numel()] = flat
            homes[base] = flat, room
        room = homes[base][1]
        raw = room.view(x.dtype) if x.dtype != torch.bool else room.view(torch.bool)
        made[name] = raw.as_strided(x.shape, x.stride(), x.storage_offset() + GUARD // x.dtype.itemsize)
    return made


_MADE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_like.default,
}


class GuardedResults(TorchDispatchMode):
    """Memory that an op asks for is poison, and lies in the middle of poison that must be there afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _MADE or found.device.type == "meta" or found.layout != torch.strided:
            return found
        count = found.untyped_storage().nbytes()
        size = found.dtype.itemsize
        room = torch.full((count + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=found.device)
        self.made.append((room, room.clone()))
        return room.view(found.dtype).as_strided(found.shape, found.stride(), GUARD // size)

    def broken(self) -> bool:
        return any(
            not torch.equal(r[part], k[part]) for r, k in self.made for part in (slice(0, GUARD), slice(-GUARD, None))
        )


def run(right: Right, given: Arguments) -> tuple[Any, bool]:
    """What the op returns, and whether it wrote beyond memory that it made itself."""
    op = getattr(torch.ops.flashsci, right.op).default
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    devices = {x.device.type for x in tensors}
    needed = (given[a.name] for a in schema_of(right.op).arguments if str(a.type) == "Tensor")
    if len(devices) > 1 or any(x is None for x in needed):
        return op(*given.values()), False
    keys = "CUDA" if "cuda" in devices else "CPU", "CompositeExplicitAutograd"
    key = next((k for k in keys if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), k)), None)
    if key is None:  # the one tensor is on a device that the op has no kernel for
        return op(*given.values()), False
    mode = GuardedResults()
    with torch.no_grad(), mode:  # past torch's dispatcher, which would show the mode the op alone
        found = op._op_dk(getattr(torch._C.DispatchKey, key), *given.values())
    if "cuda" in devices:
        torch.cuda.synchronize()
    return found, mode.broken()


def results(right: Right, given: Arguments, found: Any) -> Results:
    if right.op.endswith("paged_attention"):
        return given["out"], found if given["return_lse"] else None
    if right.op.endswith("write_kv_cache"):
        return given["k_cache"], given["v_cache"]
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def far(right: Right, found: Results, given: Arguments) -> list[str]:
    """Results that are further from the truth than twice what plain PyTorch is in their dtype, and a floor."""
    assert right.truth is not None
    truth, plain = (right.truth(given, d) for d in (torch.float64, torch.float32))
    wrong = []
    for i, (x, true, other) in enumerate(zip(found, truth, plain, strict=True)):
        if true is None or x is None:
            if x is not None and x.numel():
                wrong.append(f"result {i} was not asked for")
            continue
        if x.shape != true.shape:
            wrong.append(f"result {i} has shape {list(x.shape)}, not {list(true.shape)}")
            continue
        if not true.numel():
            continue
        x, true, other = x.double(), true.detach(), other.detach().double()
        endless = ~true.isfinite()
        if not torch.equal(x[endless].nan_to_num(nan=7), true[endless].nan_to_num(nan=7)):
            wrong.append(f"result {i} is not finite in other places")
            continue
        unit = 16 * max(torch.finfo(torch.float32).eps, _unit(found[i])) + right.unit
        size = true[~endless].abs().max().item() if (~endless).any() else 0.0
        error, allowed = ((y - true)[~endless].abs().max().item() if (~endless).any() else 0.0 for y in (x, other))
        if not error <= 2 * allowed + unit * max(size, 1.0 if right.unit else size):
            wrong.append(f"result {i} is off by {error:.2g} of {size:.2g}")
    return wrong


def _unit(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0


GIVEN = ("out", "lse", "scores")  # results of a call before
CLEAR = (ValueError, TypeError, RuntimeError, NotImplementedError)


def judge(right: Right, wrong: Wrong | None, device: str) -> list[str]:
    """What is to be said against an op: of a right call, or of one with an argument that is wrong."""
    given = right.arguments(device)
    if wrong is not None:
        # An alias needs the memory that others have in the end.
        alias = " from " in wrong.what
        given = guarded(given) if alias else given
        value = wrong.make(given)
        if value is None and alias:
            return []
        given[wrong.argument] = value
        if wrong.argument not in GIVEN:
            with contextlib.suppress(Exception):
                right.refresh(given)
        given = given if alias else guarded(given)
    else:
        given = guarded(given)
    memory = Guarded(given)
    copies = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
    problems = []
    try:
        found, broken = run(right, given)
    except Exception as error:
        text = str(error)
        names = "|".join(re.escape(n) for n in given)
        named = "flashsci" in text or re.search(rf"\b({names})\b", text)
        if not isinstance(error, CLEAR) or not named:
            problems.append(f"an unclear {type(error).__name__}: {text[:200]}")
        if wrong is None and right.op not in RAISES:
            problems.append(f"a right call raised {text[:300]}")
        if memory.changed(()):
            problems.append(f"raised after it had written to {memory.changed(())}")
        return problems
    if broken:
        problems.append("wrote beyond a result of its own")
    if changed := memory.changed(right.written):
        problems.append(f"wrote to {changed}")
    if wrong is not None and (wrong.contents or (wrong.argument in right.loose and not wrong.same)):
        read = () if wrong.argument.endswith("scale") else results(right, given, found)
        read = [x for x in read if x is not None and x.is_floating_point()]
        return problems + ["read what lies beyond a tensor"] * any(x.isnan().any() for x in read)
    if right.truth is None:
        return problems
    if len({x.device for x in given.values() if isinstance(x, Tensor)}) > 1:
        return [*problems, "took tensors of several devices"]
    if wrong is not None and wrong.argument in GIVEN and not wrong.same and wrong.what != "None":
        return [*problems, "took it"]
    try:
        return problems + far(right, results(right, given, found), copies)
    except Exception as error:
        return [
            *problems,
            f"accepted what has no truth ({type(error).__name__}: {str(error)[:200]})",
        ]


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


# Their result is a structure of the host, which no tracer sees: a call that is traced never prepares a launch.
NEVER_TRACED = ("cuda_prepared_forward", "cuda_prepared_backward")


def opcheck(right: Right, device: str) -> set[str]:
    """The outcomes of torch's checks of a right call. That of schemas multiplies tensors, which those of 8-bit floats do
    not take."""
    given = tuple(right.arguments(device).values())
    eight = any(isinstance(x, Tensor) and x.dtype.itemsize == 1 and x.is_floating_point() for x in given)
    op = getattr(torch.ops.flashsci, right.op).default
    checks = [check for check in CHECKS if not (eight and check == "test_schema")]
    if right.op in NEVER_TRACED:
        checks = ["test_schema", "test_autograd_registration"]
    return set(torch.library.opcheck(op, given, test_utils=checks).values())
