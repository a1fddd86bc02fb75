"""Times features that the CUDA kernels leave to Triton (docs/guide/backends.md): dropout and ALiBi, against SDPA and FlexAttention.

    python -m tools.bench.time_features [--seconds 0.3] [--dtype bf16]

Forward, and forward with backward, medians of interleaved runs in one process. Peers get these features in their
own form: SDPA its own dropout (which drops other entries), ALiBi as a bias tensor; FlexAttention ALiBi as a score
function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashsci
from tools.bench.inputs import DTYPES
from tools.bench.timer import interleave

SHAPES = {"B 4, H 16, S 1024, D 64": (4, 16, 1024, 64), "B 1, H 32, S 8192, D 128": (1, 32, 8192, 128)}  # fmt: skip
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def slopes(heads: int, device: torch.device) -> Tensor:
    """The slopes of Press et al., arXiv:2108.12409: a geometric sequence."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)


def candidates(shape: tuple[int, int, int, int], device: torch.device) -> dict[str, dict[str, Call]]:  # fmt: skip
    """The calls by feature and name."""
    _, heads, length, _ = shape
    slope = slopes(heads, device)
    i = torch.arange(length, device=device)
    away = -(i[:, None] - i[None, :]).abs()

    def alibi_bias(q: Tensor) -> Tensor:
        return (slope[:, None, None] * away).to(q.dtype)[None]

    def ours(**options: object) -> Call:
        return lambda q, k, v: flashsci.attention(q, k, v, backend="triton", **options)  # type: ignore[arg-type]

    found: dict[str, dict[str, Call]] = {
        "no feature": {"triton": ours(), "sdpa": lambda q, k, v: sdpa(q, k, v)},
        "dropout": {
            "triton": ours(dropout_p=0.1),
            "sdpa": lambda q, k, v: sdpa(q, k, v, dropout_p=0.1),
        },
        "ALiBi": {"triton": ours(alibi_slopes=slope)},
    }
    if length <= 4096:  # a bias of all pairs
        found["ALiBi"]["sdpa"] = lambda q, k, v: sdpa(q, k, v, alibi_bias(q))
    if device.type == "cuda":
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slope[h] * (i - j).abs()

        found["ALiBi"]["flex"] = lambda q, k, v: compiled(q, k, v, score_mod=score_mod)
    return found


def measure(calls: dict[str, Call], tensors: list[Tensor], seconds: float) -> dict[str, str]:
    """Times of one feature, by direction: each candidate's median. tensors: q, k, v and dout."""
    *leaves, dout = tensors

    def forward(call: Call) -> Callable[[], object]:
        plain = [x.detach() for x in leaves]
        return lambda: call(*plain)

    def both(call: Call) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(*leaves), leaves, dout)

    found = {}
    for direction, wrap in (("forward", forward), ("forward and backward", both)):
        times = interleave({n: wrap(c) for n, c in calls.items()}, dout.device, seconds)
        found[direction] = ", ".join(f"{n} {1e6 * t.median:.0f} us" for n, t in times.items())
    return found


def main(seconds: float = 0.3, dtype: str = "bf16", small: bool = False) -> None:
    """Print a table; ``small``: one shape for a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = {"B 1, H 2, S 32, D 16": (1, 2, 32, 16)} if small else SHAPES
    for title, shape in shapes.items():
        tensors = [torch.randn(shape, dtype=DTYPES[dtype], device=device) for _ in range(4)]
        for x in tensors[:3]:
            x.requires_grad_()
        for feature, calls in candidates(shape, device).items():
            for direction, shown in measure(calls, tensors, seconds).items():
                print(f"{title}, {dtype}, {feature}, {direction}: {shown}", flush=True)


if __name__ == "__main__":
    typer.run(main)
