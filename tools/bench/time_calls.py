"""The host time of a small call, compared with torch's SDPA.

    python -m tools.bench.time_calls [--seconds 0.5] [--only "cuda, dense bf16"]

On a GPU calls follow each other without a wait, but not more than a launch queue holds; the result is the host time
alone if the kernels are shorter than that, as they are at these sizes. Without a GPU nothing is launched
(tools/bench/no_launch.py), only ratios mean something, and the least of many times is shown, since such machines are
often shared. Each figure includes torch's own time: the last rows give autograd's part of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashsci
from tools.bench.inputs import DTYPES
from tools.bench.timer import host_time

SHAPE = (1, 4, 64, 32)
BACKENDS = ("cuda", "triton", "auto")
Call = Callable[..., Tensor]


def cases(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Call, list[Tensor]]]:
    """Name, call and its tensors; all of these have gradients."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    name = next(n for n, x in DTYPES.items() if x is dtype)
    dense = [draw(*SHAPE) for _ in range(3)]
    biased = [*dense, draw(1, *SHAPE[1:3], SHAPE[2])]
    # The output layout of a Linear over pairs: kernels get a copy.
    heads_last = [*dense, draw(1, SHAPE[2], SHAPE[2], SHAPE[1]).permute(0, 3, 1, 2)]
    shared = torch.ones(SHAPE[2], SHAPE[2], dtype=torch.bool, device=device).tril()
    packed = [draw(SHAPE[2], SHAPE[1], SHAPE[3]) for _ in range(3)]
    offsets = torch.tensor([0, 40, SHAPE[2]], dtype=torch.int32, device=device)
    for backend in BACKENDS:

        def attention(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
            return flashsci.attention(q, k, v, backend=backend)

        def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, backend: str = backend) -> Tensor:
            return flashsci.attention(q, k, v, bias=bias, backend=backend)

        def with_mask(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
            return flashsci.attention(q, k, v, mask=shared, backend=backend)

        def of_packed(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> Tensor:
            return flashsci.varlen_attention(q, k, v, offsets, max_seqlen_q=40, max_seqlen_k=40, backend=backend)

        yield f"{backend}, dense {name}", attention, dense
        yield f"{backend}, pair bias {name}", with_bias, biased
        yield f"{backend}, pair bias with heads last {name}", with_bias, heads_last
        yield f"{backend}, mask of two dims {name}", with_mask, dense
        yield f"{backend}, packed {name}", of_packed, packed
    yield f"torch's SDPA, dense {name}", sdpa, dense
    yield f"torch's SDPA, pair bias {name}", lambda q, k, v, b: sdpa(q, k, v, attn_mask=b), biased
    yield f"an addition of torch's, {name}", lambda q, k, v: torch.addcmul(q, k, v), dense


def functions(call: Call, tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Forward of tensors without gradients, and forward and backward, of all tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    dout = torch.ones_like(call(*tensors))
    return {
        "forward": lambda: call(*tensors),
        "forward and backward": lambda: torch.autograd.grad(call(*leaves), leaves, dout),
    }


def main(seconds: float = 0.5, only: str = "") -> None:
    """Print a table; ``only``: rows whose name contains this."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    where = contextlib.nullcontext()
    if not on_gpu:
        from tools.bench.no_launch import keep_memory, no_launches

        keep_memory()
        torch.set_num_threads(1)
        where = no_launches()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if on_gpu else 'no launches'}")
    print("name, us of host time forward, us forward and backward")
    with where:
        for dtype in (torch.bfloat16, torch.float32):
            for name, call, tensors in cases(dtype, device):
                if only not in name:
                    continue
                try:
                    able = functions(call, tensors)
                except flashsci.BackendError as error:
                    print(name, error, sep=", ")
                    continue
                times = host_time(able, device, seconds, 100 if on_gpu else 10).values()
                shown = [f"{1e6 * (t.median if on_gpu else t.min):.1f}" for t in times]
                print(name, *shown, sep=", ", flush=True)


if __name__ == "__main__":
    typer.run(main)
