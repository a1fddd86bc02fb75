"""The tensors of a drawn call, made on its device in the memory layout that the call has."""

from __future__ import annotations

import torch
from torch import Tensor

from flashsci.testing.calls import DrawnCall
from flashsci.testing.inputs import Inputs


def make_call(call: DrawnCall, device: torch.device | str = "cpu") -> Inputs:
    """The tensors and options of a drawn call, for :func:`evaluate` and :class:`Judge`. A device has values of its own;
    "meta" has none.

    Examples:
        >>> from flashsci.testing import DrawnCall, Judge, evaluate, make_call
        >>> inputs = make_call(DrawnCall(seed=1, index=0, heads=2, seq_q=7, seq_k=9, dtype="float32"))
        >>> Judge(inputs).require(evaluate(inputs, "reference"))
    """
    return _Maker(call, torch.device(device)).inputs()


class _Maker:
    def __init__(self, call: DrawnCall, device: torch.device):
        self.call, self.device = call, device
        seed = 1_000_003 * call.seed + call.index
        self.random = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.call.torch_dtype if dtype is None else dtype
        return torch.randn(shape, generator=self.random, device=self.device, dtype=dtype)

    def inputs(self) -> Inputs:
        call = self.call
        q, k, v = self.rows()
        bias = self.bias()
        learns = call.work != "forward"
        options = {"causal": call.causal, "window": call.window, "align": call.align, "softcap": call.softcap}
        options |= {"dropout_p": call.dropout_p}
        offsets = None
        if call.lens:
            options["max_seqlen_q"] = max(call.lens)
            offsets = torch.tensor([0, *call.lens]).cumsum(0).to(device=self.device, dtype=torch.int32)
        tangents: dict[str, Tensor] = {}
        if call.work == "second":
            given = {"tq": q, "tk": k, "tv": v, **({"tbias": bias} if call.bias_grad else {})}
            tangents = {n: self.normal(*x.shape, dtype=x.dtype) for n, x in given.items() if x is not None}
        slopes = torch.arange(1, call.heads + 1, device=self.device, dtype=torch.float32) * (-8 / call.heads)
        return Inputs(
            q,
            k,
            v,
            bias=bias,
            mask=self.mask(),
            dout=self.part(call.seq_q, call.heads, call.dim_v) if learns else None,
            cu_seqlens_q=offsets,
            dropout_seed=torch.tensor([call.seed, call.index], device=self.device) if call.dropout_p else None,
            key_weight=self.key_weight() if call.key_weight else None,
            alibi_slopes=slopes.exp2() if call.alibi else None,
            sink=self.normal(call.heads) if call.sink else None,
            bias_grad=call.bias_grad,
            key_weight_grad=False,
            options=options,
            tangents=tangents,
        )

    def part(self, length: int, heads: int, dim: int) -> Tensor:
        """A tensor [B, H, S, D], or packed [T, H, D], in the layout of the call, and in memory of its own."""
        call = self.call
        if call.lens:
            return self.normal(call.tokens, heads, dim)
        if call.layout == "bhsd":
            return self.normal(call.batch, heads, length, dim)
        return self.normal(call.batch, length, heads, dim).transpose(1, 2)

    def slices(self, length: int, *sizes: tuple[int, int]) -> list[Tensor]:
        """Tensors of these numbers of heads and dims, as slices of one projection."""
        call = self.call
        widths = [heads * dim for heads, dim in sizes]
        lead = (call.tokens,) if call.lens else (call.batch, length)
        parts = self.normal(*lead, sum(widths)).split(widths, -1)
        found = [x.unflatten(-1, size) for x, size in zip(parts, sizes, strict=True)]
        return found if call.lens else [x.transpose(1, 2) for x in found]

    def rows(self) -> list[Tensor]:
        """q, k and v."""
        call = self.call
        sizes = (call.heads, call.dim), (call.heads_k, call.dim), (call.heads_k, call.dim_v)
        if call.layout != "qkv":
            lengths = call.seq_q, call.seq_k, call.seq_k
            return [self.part(n, *size) for n, size in zip(lengths, sizes, strict=True)]
        if call.seq_q == call.seq_k:
            return self.slices(call.seq_q, *sizes)
        return [self.part(call.seq_q, *sizes[0]), *self.slices(call.seq_k, *sizes[1:])]

    def bias(self) -> Tensor | None:
        call, shape = self.call, self.call.bias_shape
        if shape is None:
            return None
        dtype = getattr(torch, str(call.bias_dtype))
        if call.bias_inner == "keys":
            return self.normal(*shape, dtype=dtype)
        *lead, heads, queries, keys = shape
        return self.normal(*lead, queries, keys, heads, dtype=dtype).movedim(-1, -3)

    def key_weight(self) -> Tensor:
        """Weights between 0.05 and 1, in fp32."""
        call = self.call
        shape = (call.tokens,) if call.lens else (call.batch, 1, call.seq_k)
        return 0.05 + 0.95 * self.uniform(*shape)

    def mask(self) -> Tensor | None:
        call, shape = self.call, self.call.mask_shape
        if shape is None:
            return None
        keys = torch.arange(shape[-1], device=self.device)
        queries = torch.arange(shape[-2], device=self.device)[:, None]
        if call.mask == "keys":
            real = self.integers(1 + shape[-1] // 2, shape[-1], *shape[:-1], 1)
            return keys < real
        if call.mask == "band":
            return ((queries - keys).abs() <= call.mask_size)[None, None]
        if call.mask == "prefix":
            lengths = self.integers(1, call.mask_size, *shape[:-2], 1, 1)
            return (keys <= queries) | (keys < lengths)
        if call.mask == "documents":
            begins = self.uniform(*shape[:-2], shape[-1]) * call.mask_size < 1
            number = begins.cumsum(-1, dtype=torch.int32)
            return number[..., :, None] == number[..., None, :]
        graph = torch.empty(shape, dtype=torch.bool, device=self.device)
        graph.bernoulli_(call.mask_size / 100, generator=self.random)
        graph.diagonal(dim1=-2, dim2=-1).fill_(True)
        return graph

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Numbers from low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self.random, device=self.device)
