"""The public functions that take tensors: of each a right call, its tensor arguments, and its formula.

A new tensor argument, or a new function, without a description fails ``test_matrix.py``.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashsci

from . import formulas

FP8 = torch.float8_e4m3fn
BACKENDS = ("reference", "sdpa", "triton", "cuda", "auto")
PAGED = ("reference", "triton", "cuda", "auto")
OUT_ALONE = ("sdpa", "auto")  # SDPA has no lse; "auto" goes another way without
ONE_PROCESS = ("auto",)  # the plain call, bit for bit
CONTROL = "torch's own"  # what the others are compared with where torch's kernel serves them
NO_CHOICE = ("auto",)  # plain PyTorch on every device
Given = Mapping[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A public function, as the matrix calls it."""

    name: str
    function: Callable[..., Any]  # its signature says which tensor arguments there are
    needed: tuple[str, ...]  # the tensors of every call
    others: tuple[str, ...]  # optional ones: a call of their own for each
    tensors: Callable[[], dict[str, Tensor]]  # all of them, numbers in float64
    call: Callable[[str, Given], Any]  # (backend, tensors) -> results
    formula: Callable[[Given], Any]
    backends: tuple[str, ...] = BACKENDS
    derivatives: bool = True  # False: of rounded numbers there are none; only a refusal is right
    eps: float = torch.finfo(torch.float32).eps  # of the coarsest rounding on the way
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what an optional tensor brings along
    keep: tuple[str, ...] = ()  # tensors that stay in the dtype they have
    elsewhere: tuple[str, ...] = ()  # arguments of the signature that another entry describes
    together: tuple[str, ...] = ()  # a row for derivatives in all of these at once
    out_alone: tuple[str, ...] = ()  # backends that are asked for out without its lse
    lengths: Mapping[str, int] = field(default_factory=dict)  # tensors, and their dim of rows that data may choose
    dropout_of: str = ""  # the values of a call that draws a seed

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.needed, *self.others, *(("+".join(self.together),) if self.together else ()))

    def names(self, row: str) -> tuple[str, ...]:
        """The tensors of the call of a row."""
        optional = () if row in self.needed or "+" in row else (row, *self.beside.get(row, ()))
        return (*self.needed, *optional)

    def results(self, backend: str) -> int | None:
        """How many of the formula's results a call has; None: all."""
        return 1 if backend in self.out_alone else None

    def inputs(self, row: str) -> dict[str, Tensor]:
        every = made(self.name)
        return {name: every[name] for name in self.names(row)}


MADE: dict[str, dict[str, Tensor]] = {}
MAKING = threading.RLock()


def made(name: str) -> dict[str, Tensor]:
    """The tensors of an entry: one set for all threads, from torch's one generator, and for derivatives, whatever mode the first
    cell that asks is in."""
    with MAKING:
        if name not in MADE:
            with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(name.encode()))
                MADE[name] = ENTRIES[name].tensors()
        return MADE[name]


def tensor_arguments(function: Callable[..., Any]) -> set[str]:
    """The parameters that are tensors, by their annotations."""
    hints = typing.get_type_hints(function)
    return {n for n in inspect.signature(function).parameters if "torch.Tensor" in _spelled(hints.get(n))}


def _spelled(hint: Any) -> str:
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else str(hint)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _dense() -> dict[str, Tensor]:
    return dict(
        q=normal(1, 2, 4, 8), k=normal(1, 1, 5, 8), v=normal(1, 1, 5, 8), bias=normal(2, 4, 5),
        key_weight=normal(1, 5).exp(), mask=torch.rand(1, 1, 4, 5) < 0.7, alibi_slopes=normal(2), sink=normal(2),
        dropout_seed=torch.tensor([7, 3]), pair_gate=normal(1, 2, 4, 5),
    )  # fmt: skip


def _dropout(given: Given) -> dict[str, Any]:
    return {"dropout_p": 0.3} if "dropout_seed" in given else {}


def _dense_call(backend: str, x: Given) -> Any:
    found = flashsci.attention(**{**_dropout(x), **x}, return_lse=backend not in OUT_ALONE, backend=backend)
    return found if isinstance(found, tuple) else (found,)


def _dense_formula(x: Given) -> Any:
    rest = dict(x)
    seed = rest.pop("dropout_seed", None)
    if seed is not None:
        shape = (*x["q"].shape[:-1], x["k"].shape[-2])
        rest |= dict(keep=flashsci.dropout_mask(seed, 0.3, shape), dropout_p=0.3)
    return formulas.softmax_attention(**rest)


def _packed() -> dict[str, Tensor]:
    return dict(
        q=normal(5, 2, 8), k=normal(5, 1, 8), v=normal(5, 1, 8), cu_seqlens_q=ints(0, 2, 5), cu_seqlens_k=ints(0, 2, 5),
        bias=normal(2, 1, 5), key_weight=normal(1, 5).exp(), alibi_slopes=normal(2, 2), sink=normal(2),
        dropout_seed=torch.tensor([7, 3]),
    )  # fmt: skip


def _packed_call(backend: str, x: Given) -> Any:
    return flashsci.varlen_attention(**{**_dropout(x), **x}, return_lse=True, backend=backend)


def _packed_formula(x: Given) -> Any:
    edges = dict(cu_seqlens_k=x["cu_seqlens_q"]) | dict(x)
    return formulas.packed_attention(**edges, **_dropout(x))


def _residual() -> dict[str, Tensor]:
    return dict(
        q=normal(1, 2, 3, 8),
        k=normal(1, 1, 4, 8),
        v=normal(1, 1, 4, 8),
        bias=normal(1, 2, 3, 4),
        dropout_seed=torch.tensor([7, 3]),
    )


def _residual_formula(x: Given) -> Any:
    out, _ = _dense_formula(x)
    k = x["k"].repeat_interleave(2, -3)
    return out, formulas.scores_of(x["q"], k, x.get("bias"))


_ON_PAIRS = ("bias", "key_weight", "mask", "alibi_slopes")


def _maps() -> dict[str, Tensor]:
    """With an lse as of many more keys, so that P stays below 1 beside other values of each tensor."""
    found = {n: x for n, x in _dense().items() if n in ("q", "k", *_ON_PAIRS)}
    return found | dict(lse=normal(1, 2, 4) + 8, rows=torch.tensor([3, 0, 3]), columns=torch.tensor([4, 1]))


def _weights_formula(x: Given) -> Any:
    rest = dict(x)
    rows, columns = (rest.pop(n, slice(None)) for n in ("rows", "columns"))
    return (formulas.mapped_pairs(**rest)[0][..., rows, :][..., columns],)


def _statistics_call(backend: str, x: Given) -> Any:
    found = flashsci.attention_statistics(**x, entropy=True, largest_score=True, key_sum=True, top_k=2)
    return tuple(found[:4])


def _packed_maps() -> dict[str, Tensor]:
    found = {n: x for n, x in _packed().items() if n not in ("v", "sink", "dropout_seed")}
    return found | dict(lse=normal(2, 5) + 8)


def _packed_pairs(x: Given) -> list[tuple[Tensor, Tensor]]:
    """(P, S) of each sequence, by the formula of dense calls."""
    found = []
    edges = x["cu_seqlens_q"].tolist()
    for n, (i, j) in enumerate(itertools.pairwise(edges)):
        part = dict(
            q=x["q"][i:j].transpose(0, 1)[None], k=x["k"][i:j].transpose(0, 1)[None], lse=x["lse"][None, :, i:j]
        )
        if "bias" in x:
            part["bias"] = x["bias"][..., i:j]
        if "key_weight" in x:
            part["key_weight"] = x["key_weight"][..., i:j]
        if "alibi_slopes" in x:
            part["alibi_slopes"] = x["alibi_slopes"][n]
        found.append(tuple(y[0] for y in formulas.mapped_pairs(**part)))
    return found


def _packed_weights_formula(x: Given) -> Any:
    return tuple(p for p, _ in _packed_pairs(x))


def _packed_statistics_call(backend: str, x: Given) -> Any:
    found = flashsci.attention_statistics(**x, entropy=True, largest_score=True, key_sum=True)
    return tuple(found[:3])


def _packed_statistics_formula(x: Given) -> Any:
    pairs = _packed_pairs(x)
    entropies = [torch.special.entr(p).sum(-1) for p, _ in pairs]
    joined = (entropies, [s.amax(-1) for _, s in pairs], [p.sum(-2) for p, _ in pairs])
    return tuple(torch.cat(parts, -1) for parts in joined)


_HALVES = ("q_jacobian", "k_jacobian", "v_jacobian", "q_laplacian", "k_laplacian", "v_laplacian")


def _laplacian() -> dict[str, Tensor]:
    found = {n: x for n, x in _dense().items() if n in ("q", "k", "v", "bias", "mask")}
    return found | {n: normal(*(3,) * n.endswith("jacobian"), *found[n[0]].shape) for n in _HALVES}


def _paged() -> dict[str, Tensor]:
    return dict(
        q=normal(3, 2, 8), k_cache=normal(2, 16, 1, 8), v_cache=normal(2, 16, 1, 8), block_table=ints([1], [0]),
        seqused_k=ints(4, 3), cu_seqlens_q=ints(0, 1, 3), sink=normal(2), k_scale=normal(2, 1).exp(),
        v_scale=normal(2, 1).exp(), out=normal(3, 2, 8),
    )  # fmt: skip


def _paged_call(backend: str, x: Given) -> Any:
    x = dict(x)
    if "out" in x:
        x["out"] = x["out"].clone()
    return flashsci.paged_attention(**x, return_lse=True, backend=backend)


def _paged_formula(x: Given) -> Any:
    return formulas.paged(**{n: t for n, t in x.items() if n != "out"})


def _write() -> dict[str, Tensor]:
    return dict(
        key=normal(2, 1, 8),
        value=normal(2, 1, 8),
        k_cache=normal(2, 4, 1, 8),
        v_cache=normal(2, 4, 1, 8),
        slot_mapping=torch.tensor([5, 3]),
        k_scale=normal(1).exp(),
        v_scale=normal(1).exp(),
    )


def _write_call(backend: str, x: Given) -> Any:
    caches = x["k_cache"].clone(), x["v_cache"].clone()
    rest = {n: t for n, t in x.items() if n not in ("k_cache", "v_cache")}
    flashsci.write_kv_cache(**rest, k_cache=caches[0], v_cache=caches[1], backend=backend)
    return caches


def _fp8() -> dict[str, Tensor]:
    q, k, v = (
        normal(1, 2, 4, 32).to(FP8),
        normal(1, 1, 5, 32).to(FP8),
        normal(1, 1, 5, 32).to(FP8),
    )
    return dict(
        q=q,
        k=k,
        v=v,
        **{f"{n}_scale": normal(1, h).exp() for n, h in (("q", 2), ("k", 1), ("v", 1))},
    )


def _unscaled(x: Given, spread: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The numbers that 8-bit floats and their scales hold; scales are those of heads."""
    found = {n: t for n, t in x.items() if not n.endswith("_scale")}
    for name in ("q", "k", "v"):
        number = x[name].to(torch.float64)
        scale = x.get(f"{name}_scale")
        found[name] = number if scale is None else number * spread(scale)
    return found


def _fp8_packed() -> dict[str, Tensor]:
    q, k, v = (normal(5, 2, 32).to(FP8), normal(5, 1, 32).to(FP8), normal(5, 1, 32).to(FP8))
    edges = dict(cu_seqlens_q=ints(0, 2, 5), cu_seqlens_k=ints(0, 2, 5))
    return dict(
        q=q,
        k=k,
        v=v,
        **edges,
        **{f"{n}_scale": normal(2, h).exp() for n, h in (("q", 2), ("k", 1), ("v", 1))},
    )


def _rows_of_sequences(scale: Tensor) -> Tensor:
    """A scale for each sequence and head, ``[2, H]``, as it multiplies rows ``[5, H, D]``."""
    return scale.repeat_interleave(torch.tensor([2, 3], device=scale.device), 0).unsqueeze(-1)


def _backward() -> dict[str, Tensor]:
    """Of a block of keys: the lse is that of more."""
    x = dict(
        q=normal(1, 2, 3, 8),
        k=normal(1, 2, 4, 8),
        v=normal(1, 2, 4, 8),
        bias=normal(1, 2, 3, 4) / 2,
        key_weight=torch.rand(1, 2, 4, dtype=torch.float64),
        mask=torch.tensor([[[[1, 1, 1, 0]]]]) > 0,
        alibi_slopes=torch.rand(2, dtype=torch.float64),
    )
    out, lse = formulas.softmax_attention(x["q"], x["k"], x["v"], bias=x["bias"])
    more = dict(dlse=normal(1, 2, 3), dropout_seed=torch.tensor([7, 3]))
    return dict(dout=normal(1, 2, 3, 8), **x, out=out, lse=lse + 2, **more)


def _backward_call(backend: str, x: Given) -> Any:
    found = flashsci.attention_backward(**x, **_dropout(x), backend=backend)
    return tuple(t for t in found if t is not None)


def _backward_formula(x: Given) -> Any:
    rest = dict(x)
    seed = rest.pop("dropout_seed", None)
    if seed is not None:
        shape = (*x["q"].shape[:-1], x["k"].shape[-2])
        rest |= dict(keep=flashsci.dropout_mask(seed, 0.3, shape), dropout_p=0.3)
    return formulas.backward(**rest)


def _packed_backward() -> dict[str, Tensor]:
    x = dict(
        q=normal(5, 2, 8),
        k=normal(5, 2, 8),
        v=normal(5, 2, 8),
        cu_seqlens_q=ints(0, 2, 5),
        cu_seqlens_k=ints(0, 2, 5),
    )
    out, lse = formulas.packed_attention(*x.values())
    return dict(dout=normal(5, 2, 8), **x, out=out, lse=lse + 2)


def _packed_backward_formula(x: Given) -> Any:
    found = []
    for rows in (slice(0, 2), slice(2, 5)):
        part = [x[n][rows].transpose(0, 1) for n in ("dout", "q", "k", "v", "out")]
        found.append([g.transpose(0, 1) for g in formulas.backward(*part, x["lse"][:, rows])])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _sdpa() -> dict[str, Tensor]:
    x = _dense()
    k, v = normal(1, 2, 5, 8), normal(1, 2, 5, 8)
    return dict(query=x["q"], key=k, value=v, attn_mask=x["bias"])


def _sdpa_call(backend: str, x: Given) -> Any:
    with flashsci.use_backend(backend):
        return (flashsci.sdpa(**x),)


def _sdpa_formula(x: Given) -> Any:
    return formulas.softmax_attention(x["query"], x["key"], x["value"], bias=x.get("attn_mask"))[:1]


MESHES: dict[str, Any] = {}


def mesh(device: str) -> Any:
    """Of one process, made where no compiler traces."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if device not in MESHES:
        if not dist.is_initialized():
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        MESHES[device] = init_device_mesh(device, (1,))
    return MESHES[device]


def mesh_of(x: Tensor) -> Any:
    """That of the tensor's device; tensors without memory are on any."""
    return next(iter(MESHES.values())) if x.is_meta else MESHES[x.device.type]


def _distributed(name: str) -> Callable[[str, Given], Any]:
    import flashsci.distributed as fd

    function = getattr(fd, name)

    def call(backend: str, x: Given) -> Any:
        options: dict[str, Any] = {} if name != "varlen_attention" and backend in OUT_ALONE else {"return_lse": True}
        found = function(**x, mesh=mesh_of(x["q"]), backend=backend, **options)
        return found if isinstance(found, tuple) else (found,)

    return call


def _triangle() -> dict[str, Tensor]:
    q, k, v = normal(2, 2, 4, 8), normal(2, 2, 4, 8), normal(2, 2, 4, 8)
    return dict(q=q, k=k, v=v, bias=normal(2, 4, 4), mask=torch.tensor([1, 1, 0, 1]).expand(2, 1, 1, 4) > 0)


def _without(tensors: Callable[[], dict[str, Tensor]], *names: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {n: x for n, x in tensors().items() if n not in names}


def _entries() -> list[Entry]:
    import flashsci.distributed as fd

    qkv = ("q", "k", "v")
    scales = tuple(f"{n}_scale" for n in qkv)
    edges = ("cu_seqlens_q", "cu_seqlens_k")
    caches = ("k_cache", "v_cache")
    serving = dict(backends=PAGED)
    eighth = dict(backends=PAGED, derivatives=False, eps=2.0**-4, keep=qkv)  # P is rounded to an 8-bit float
    return [
        Entry("attention", flashsci.attention, qkv,
              ("bias", "key_weight", "mask", "alibi_slopes", "sink", "dropout_seed", "pair_gate"),
              _dense, _dense_call, _dense_formula, together=qkv, elsewhere=scales, out_alone=OUT_ALONE,
              lengths={"q": -2}, dropout_of="v"),
        Entry("attention, 8-bit floats", flashsci.attention, qkv, scales, _fp8, _dense_call,
              lambda x: formulas.softmax_attention(**_unscaled(x, lambda s: s[..., None, None])), **eighth, out_alone=OUT_ALONE,
              elsewhere=("bias", "key_weight", "mask", "alibi_slopes", "sink", "dropout_seed", "pair_gate")),
        Entry("varlen_attention", flashsci.varlen_attention, (*qkv, "cu_seqlens_q"),
              ("cu_seqlens_k", "bias", "key_weight", "alibi_slopes", "sink", "dropout_seed"),
              _packed, _packed_call, _packed_formula, together=qkv, elsewhere=scales, lengths=dict.fromkeys(qkv, 0), dropout_of="v"),
        Entry("varlen_attention, 8-bit floats", flashsci.varlen_attention, (*qkv, "cu_seqlens_q"), ("cu_seqlens_k", *scales),
              _fp8_packed, _packed_call, lambda x: _packed_formula(_unscaled(x, _rows_of_sequences)), **eighth,
              elsewhere=("bias", "key_weight", "alibi_slopes", "sink", "dropout_seed")),
        Entry("residual_attention", flashsci.residual_attention, qkv, ("bias", "dropout_seed"), _residual,
              lambda b, x: flashsci.residual_attention(**{**_dropout(x), **x}, backend=b), _residual_formula, together=qkv,
              lengths={"q": -2}, dropout_of="v"),
        Entry("sdpa", flashsci.sdpa, ("query", "key", "value"), ("attn_mask",), _sdpa, _sdpa_call, _sdpa_formula,
              lengths={"query": -2}, dropout_of="value"),
        Entry("attention_backward", flashsci.attention_backward, ("dout", *qkv, "out", "lse"),
              ("dlse", "bias", "key_weight", "mask", "alibi_slopes", "dropout_seed"), _backward, _backward_call, _backward_formula,
              elsewhere=edges),
        Entry("attention_backward, packed", flashsci.attention_backward, ("dout", *qkv, "out", "lse", *edges), (),
              _packed_backward, _backward_call, _packed_backward_formula,
              elsewhere=("dlse", "bias", "key_weight", "mask", "alibi_slopes", "dropout_seed")),
        Entry("paged_attention", flashsci.paged_attention, ("q", *caches, "block_table", "seqused_k", "cu_seqlens_q"),
              ("sink", "k_scale", "v_scale", "out"), _paged, _paged_call, _paged_formula, **serving, lengths={"q": 0}),
        Entry("write_kv_cache", flashsci.write_kv_cache, ("key", "value", *caches, "slot_mapping"), ("k_scale", "v_scale"),
              _write, _write_call, lambda x: formulas.stored(**x), **serving),
        Entry("attention_weights", flashsci.attention_weights, ("q", "k", "lse"), (*_ON_PAIRS, "rows", "columns"), _maps,
              lambda b, x: (flashsci.attention_weights(**x),), _weights_formula, NO_CHOICE, elsewhere=edges),
        Entry("attention_statistics", flashsci.attention_statistics, ("q", "k", "lse"), _ON_PAIRS,
              _without(_maps, "rows", "columns"), _statistics_call, lambda x: formulas.map_statistics(**x), NO_CHOICE, elsewhere=edges),
        Entry("attention_weights, packed", flashsci.attention_weights, ("q", "k", "lse", *edges),
              ("bias", "key_weight", "alibi_slopes"), _packed_maps, lambda b, x: flashsci.attention_weights(**x),
              _packed_weights_formula, NO_CHOICE, elsewhere=("mask", "rows", "columns")),
        Entry("attention_statistics, packed", flashsci.attention_statistics, ("q", "k", "lse", *edges),
              ("bias", "key_weight", "alibi_slopes"), _packed_maps, _packed_statistics_call,
              _packed_statistics_formula, NO_CHOICE, elsewhere=("mask",)),
        Entry("forward_laplacian", flashsci.forward_laplacian, qkv, (*_HALVES, "bias", "mask"), _laplacian,
              lambda b, x: tuple(flashsci.forward_laplacian(**x, backend=b)), lambda x: formulas.forward_laplacian(**x),
              ("reference", "triton", "auto"), together=qkv),
        Entry("merge", flashsci.merge, ("outs", "lses"), (), lambda: dict(outs=normal(2, 1, 2, 3, 8), lses=normal(2, 1, 2, 3)),
              lambda b, x: flashsci.merge(**x), lambda x: formulas.merged(**x), NO_CHOICE),
        Entry("quantize", flashsci.quantize, ("x",), ("cu_seqlens",), lambda: dict(x=normal(5, 2, 8), cu_seqlens=ints(0, 2, 5)),
              lambda b, x: flashsci.quantize(**x, per="head")[:2], lambda x: formulas.quantized(**x), NO_CHOICE,
              derivatives=False, eps=2.0**-4),
        Entry("dropout_mask", flashsci.dropout_mask, ("dropout_seed",), (), lambda: dict(dropout_seed=torch.tensor([7, 3])),
              lambda b, x: (flashsci.dropout_mask(x["dropout_seed"], 0.3, (1, 2, 3, 4)).float(),),
              lambda x: (flashsci.dropout_mask(x["dropout_seed"].cpu(), 0.3, (1, 2, 3, 4)).double(),), NO_CHOICE, derivatives=False),
        Entry("distributed.attention", fd.attention, qkv, ("bias", "key_weight", "mask"),
              _without(_dense, "alibi_slopes", "sink", "dropout_seed", "pair_gate"), _distributed("attention"), _dense_formula, ONE_PROCESS, out_alone=OUT_ALONE),
        Entry("distributed.varlen_attention", fd.varlen_attention, (*qkv, "cu_seqlens"), ("bias", "key_weight"),
              lambda: {("cu_seqlens" if n == "cu_seqlens_q" else n): x for n, x in _packed().items()
                       if n not in ("cu_seqlens_k", "alibi_slopes", "sink", "dropout_seed")},
              _distributed("varlen_attention"),
              lambda x: _packed_formula({("cu_seqlens_q" if n == "cu_seqlens" else n): t for n, t in x.items()}), ONE_PROCESS),
        Entry("distributed.triangle_attention", fd.triangle_attention, (*qkv, "bias"), ("mask",), _triangle,
              _distributed("triangle_attention"), _dense_formula, ONE_PROCESS, out_alone=OUT_ALONE),
        *(Entry(f"distributed.{name}", getattr(fd, name), ("x",), (), lambda: dict(x=normal(1, 2, 4, 8)),
                lambda b, x, name=name: (getattr(fd, name)(x["x"], mesh_of(x["x"])),), lambda x: (x["x"],), ONE_PROCESS)
          for name in ("shard", "unshard")),
        Entry(CONTROL, F.scaled_dot_product_attention, qkv, (), lambda: dict(zip(qkv, normal(3, 1, 2, 4, 8), strict=True)),
              lambda b, x: (F.scaled_dot_product_attention(*x.values()),), lambda x: formulas.softmax_attention(**x)[:1], NO_CHOICE),
    ]  # fmt: skip


ENTRIES: dict[str, Entry] = {}
ENTRIES.update({entry.name: entry for entry in _entries()})
