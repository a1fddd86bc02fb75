"""Cases of raw backward launchers that `python -m flashsci check` does not have: a given lse that is larger, gradients that nobody wants, rows of
nobody, every broadcast of bias and mask with rows in longer memory, what must be refused, up to 100 deterministic repeats. 16-bit units, against
fp64. Needs a GPU. The sm90 units leave the gradient of a shared bias to sm80's: link both.

    python -m tools.check_backward new=new.so --dims 64,128 --only pairs
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from flashsci.registry import BackendError
from tools import exact
from tools.exact import WINDOWS, Record, attention, bound, gradients, make, poisoned
from tools.launchers import Build

Sizes = tuple[int, ...]  # batch, heads_q, heads_k, seq_q, seq_k
LABELS = ("dq", "dk", "dv", "dbias")


class Check:
    """The cases of one build, dtype and bucket of head dims."""

    def __init__(self, build: Build, dtype: torch.dtype, dim: int, record: Record):
        self.build, self.dtype, self.dim, self.record = build, dtype, dim, record
        self.title = f"{build.name} {dtype}"
        self.hopper = build.folders["backward", dtype] == "sm90"

    def compare(self, name: str, got: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        wide = (None if x is None else x.double() for x in arguments)
        want, sizes = gradients(*wide, torch.float64, **options)
        base, _ = gradients(*arguments, self.dtype, **options)
        errors = []
        for label, g, w, b, size in zip(LABELS, got, want, base, sizes, strict=False):
            if g.numel() == 0:
                continue
            largest = size.max().item()
            # fp32: nothing in its way is rounded to 16 bits
            most = bound(b, w, largest) if g.dtype == self.dtype else 2**-13 * largest
            errors.append((label, g, w, most))
        self.record.within(name, errors)

    def case(self, name: str, sizes: Sizes, d: int, dv: int, layout: str = "bshd", size: float = 1.0, extra: float = 0.0, dlse: bool = False,
             no_dout: bool = False, need: int = 15, repeats: int = 0, refused: bool = False, **options: Any) -> None:  # fmt: skip
        shown = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in options.items()}
        name = f"{self.title} {name} {sizes} d{d}/{dv} {layout} size {size} extra {extra} dlse {dlse} need {need} {shown}"
        b, h, hk, sq, sk = sizes
        q, k = (make(shape, self.dtype, layout, size) for shape in ((b, h, sq, d), (b, hk, sk, d)))
        v, dout = (make(shape, self.dtype, layout) for shape in ((b, hk, sk, dv), (b, h, sq, dv)))
        out, lse = attention(q, k, v, **options)
        out, lse = out.to(self.dtype), (lse + extra).float()
        grad_lse = torch.randn_like(lse) if dlse else None
        with poisoned():
            run, *got = self.build.backward_launch(
                None if no_dout else dout, q, k, v, out, lse, dlse=grad_lse, need=need, deterministic=repeats > 0, **options
            )  # fmt: skip
        if refused and self.hopper:
            try:
                run()
                self.record.fail(f"{name}: not refused")
            except BackendError:
                return
        if not self.record.launch(name, run):
            return
        self.record.repeats(name, run, got, repeats)
        self.compare(name, got, (dout * (not no_dout), q, k, v, out, lse, grad_lse), **options)

    def dense(self) -> None:
        d = self.dim
        for sizes in [(1, 1, 1, 64, 128), (1, 1, 1, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 333), (2, 3, 3, 1, 77), (1, 4, 2, 777, 129),
                      (1, 1, 1, 64, 1), (3, 6, 2, 300, 1000), (20, 8, 4, 321, 321), (1, 2, 2, 1500, 1411)]:  # fmt: skip
            for window, lower_right in WINDOWS:
                self.case("dense", sizes, d, d, "bhsd", window=window, lower_right=lower_right)
        some, one = (2, 4, 2, 333, 444), (1, 4, 2, 333, 444)
        wide = [(d, 128), (d - 56, 24), (24, d - 16)] if d > 128 else []
        for dq, dv in [(d - 56, d - 56), (d - 8, d), (d, d - 56), (d - 16, d - 16), (8, d), *wide]:
            self.case("dense", some, dq, dv, "bhsd", window=(-1, 0), lower_right=True)
        for scale in (-0.3, 0.0):
            self.case("scale", some, d, d, "bhsd", scale=scale)
        self.case("dlse", one, d, d, "bhsd", dlse=True)
        self.case("a global lse", one, d, d, "bhsd", extra=1.5)
        self.case("no dout", one, d, d, "bhsd", dlse=True, no_dout=True)
        for need in (1, 2, 4, 6):
            self.case("need", one, d, d, "bhsd", need=need)
        # rows whose exponentials would overflow without a mask (lse far below -88.7)
        for s in (64, 192, 320):
            self.case("low", (1, 2, 2, s, s), d, d, "bhsd", window=(-1, 0), size=12.0)
            self.case("low", (1, 2, 2, s, s), d, d, "bhsd", window=(16, 16), size=30.0)
            self.case("low", (1, 2, 2, s, s), d, d, "bhsd", scale=-1.0, size=8.0)

    def values(self) -> None:
        """Values with a head dim of their own."""
        d, some, repeated = self.dim, (2, 4, 2, 333, 448), (2, 8, 4, 900, 1100)
        for dv in (64, 96, 128, 192, 256):
            if dv == d:
                continue
            for window, lower_right in WINDOWS[:5]:
                options: dict[str, Any] = {"window": window, "lower_right": lower_right}
                self.case("values", some, d, dv, "bhsd", dlse=True, **options)
                self.case("values", some, d - 16, dv - 8, "bhsd", **options)
                self.sequences(d, dv, window, lower_right)
            for softcap in (0.0, 3.0):
                self.case("values", (1, 2, 1, 6000, 300), d, dv, "bhsd", softcap=softcap)
                self.case("values", some, d, dv, "bhsd", window=(-1, 0), softcap=softcap)
                self.case("values", repeated, d, dv, "bhsd", window=(-1, 0), softcap=softcap, repeats=10)  # fmt: skip
                self.sequences(d, dv, (-1, 0), True, softcap=softcap, repeats=10)
            if not self.hopper or max(d, dv) <= 128:
                for bias_dtype in (self.dtype, torch.float32):
                    self.shared(some, 1, 1, 1, 1, dims=(d, dv), bias_dtype=bias_dtype)
                    self.with_bias(some, 0, 1, 1, 1, dims=(d - 8, dv), bias_dtype=bias_dtype)
                self.with_bias(some, dims=(d, dv), mask=(2, 1, 333, 448), window=(-1, 0))

    def softcap(self) -> None:
        for window, lower_right in WINDOWS[:4]:
            self.case("softcap", (2, 4, 2, 333, 444), self.dim, self.dim, "bhsd", window=window, lower_right=lower_right, softcap=3.0)  # fmt: skip

    def turns(self) -> None:
        """Deterministic."""
        d = self.dim
        for window, lower_right in WINDOWS:
            for sizes in [(2, 4, 4, 512, 512), (1, 6, 2, 777, 129), (3, 6, 2, 300, 1000), (2, 4, 2, 1500, 1411)]:  # fmt: skip
                self.case("turns", sizes, d, d, "bhsd", window=window, lower_right=lower_right, repeats=10)  # fmt: skip
            self.sequences(d, d, window, lower_right, repeats=10)
        lens = [300, 1000, 17, 640, 64, 2000, 5]
        for window in ((-1, -1), (-1, 0)):
            self.sequences(d, d, window, True, lens_q=lens, lens_k=lens[::-1], repeats=100)
            self.case("turns", (2, 8, 8, 2048, 2048), d, d, "bhsd", window=window, repeats=100)

    def packed(self) -> None:
        d = self.dim
        for window, lower_right in WINDOWS:
            self.sequences(d, d, window, lower_right)
        self.sequences(d - 8, d, (-1, 0), True)
        self.sequences(d, d, (-1, 0), True, softcap=5.0)
        few = {"lens_q": [5, 50, 300, 0, 40], "lens_k": [7, 30, 200, 3, 500]}
        self.sequences(d, d, (-1, -1), False, head=0, **few)

    def sequences(
        self,
        d: int,
        dv: int,
        window: tuple[int, int],
        lower_right: bool,
        softcap: float = 0.0,
        lens_q: list[int] | None = None,
        lens_k: list[int] | None = None,
        head: int = 3,
        repeats: int = 0,
    ) -> None:
        lens_q = lens_q or [0, 1, 130, 63, 64, 0, 400, 193, 7, 128]
        lens_k = lens_k or [5, 1, 77, 64, 200, 9, 300, 0, 129, 128]
        options: dict[str, Any] = {"window": window, "lower_right": lower_right, "softcap": softcap}
        name = f"{self.title} packed d{d}/{dv} {options} {lens_q}"
        cu = tuple(
            torch.tensor([head, *lens], device=exact.DEVICE).cumsum(0).int()
            for lens in (lens_q, lens_k)
        )
        starts_q, starts_k = (x.tolist() for x in cu)
        total_q, total_k = starts_q[-1] + 5, starts_k[-1] + 6
        h, hk = 6, 2
        q, dout, out = (make((h, total_q, n), self.dtype, "bshd") for n in (d, dv, dv))
        k, v = (make((hk, total_k, n), self.dtype, "bshd") for n in (d, dv))
        lse = torch.full((h, total_q), float("-inf"), device=q.device)
        poison = len(lens_q) // 2 - 1
        parts = []  # rows, keys
        for n in range(len(lens_q)):
            rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
            parts.append((rows, keys))
            if keys.stop > keys.start:
                o, s = attention(q[:, rows], k[:, keys], v[:, keys], **options)
                out[:, rows], lse[:, rows] = o.to(self.dtype), s.float()
            else:
                out[:, rows] = 0
        # one sequence is poison, as is what belongs to nobody
        for x, starts in ((q, starts_q), (dout, starts_q), (k, starts_k), (v, starts_k)):
            x[:, starts[poison] : starts[poison + 1]] = float("nan")
            x[:, : starts[0]] = x[:, starts[-1] :] = float("nan")
        with poisoned():
            run, *got, _ = self.build.backward_launch(
                dout, q, k, v, out, lse, cu=cu, deterministic=repeats > 0, **options
            )
        if not self.record.launch(name, run):
            return
        self.record.repeats(name, run, got, repeats)
        for n, (rows, keys) in enumerate(parts):
            if n != poison:
                mine = got[0][:, rows], got[1][:, keys], got[2][:, keys]
                arguments = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, rows], None)  # fmt: skip
                self.compare(f"{name} sequence {n}", mine, arguments, **options)
        for x, starts in zip(got, (starts_q, starts_k, starts_k), strict=True):
            if not ((x[:, : starts[0]] == 0).all() and (x[:, starts[-1] :] == 0).all()):
                self.record.fail(f"{name}: rows of nobody")
        # any contents of the offsets: in bounds, no hang
        garbage = tuple(torch.randint_like(x, -(2**31), 2**31 - 1) for x in cu)
        run, *_ = self.build.backward_launch(
            dout, q, k, v, out, lse, cu=garbage, deterministic=repeats > 0, **options
        )
        self.record.launch(f"{name}: offsets of any contents", run)

    def with_bias(self, sizes: Sizes, *shape: int, bias_dtype: torch.dtype | None = None, mask: Sizes | None = None, hidden: float = 0.0, pad: int = 0,
                  dims: tuple[int, int] | None = None, **options: Any) -> None:  # fmt: skip
        """shape: whether the bias has a batch, heads, queries, keys; nothing: no bias."""
        full = (sizes[0], sizes[1], sizes[3], sizes[4])
        if shape:  # rows of the memory are longer by `pad`, which is NaN
            *rows, keys = (n if has else 1 for n, has in zip(full, shape, strict=True))
            x = make((*rows, keys + pad), bias_dtype or self.dtype)
            x[..., keys:] = float("nan")
            options["bias"] = x = x[..., :keys]
            if hidden:
                x.masked_fill_(torch.rand(x.shape, device=x.device) < hidden, float("-inf"))
                x[..., :: max(x.shape[-2] // 5, 1), :] = float("-inf")  # rows without keys
        if mask is not None:
            options["mask"] = torch.rand(mask, device=exact.DEVICE) < 0.6
        self.case(f"pairs pad {pad}", sizes, *(dims or (self.dim, self.dim)), **options)

    def pairs(self) -> None:
        """A bias by pairs in q's dtype; a bias or mask of keys."""
        if self.hopper and self.dim > 128:
            return  # sm80's
        d, case = self.dim, self.with_bias
        for sizes in [(1, 2, 2, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 336), (3, 6, 2, 300, 1000), (1, 2, 2, 1, 80), (2, 2, 2, 1500, 1408)]:  # fmt: skip
            for window, lower_right in WINDOWS[:5]:
                case(sizes, 1, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1)
        for shape in [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]:  # fmt: skip
            for sizes in [(3, 4, 2, 257, 264), (2, 6, 6, 640, 384)]:
                self.shared(sizes, *shape)
        odd = (2, 4, 2, 200, 333)
        for shape in [(1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1)]:
            case(odd, *shape, bias_dtype=torch.float32)
            case(odd, *shape, hidden=0.2)
        for mask in [(2, 4, 1, 333), (2, 1, 1, 333), (1, 1, 1, 333)]:
            case(odd, mask=mask)
            case(odd, mask=mask, dims=(d - 8, d - 16), window=(-1, 0))
        some = (2, 4, 2, 333, 448)
        for dims in [(d - 56, d - 56), (d - 8, d), (d, d - 56)]:
            case(some, 1, 1, 1, 1, dims=dims, window=(50, 70))
            case(some, 0, 1, 1, 1, dims=dims)
        case((2, 4, 2, 333, 441), 1, 1, 1, 1, pad=7, need=7)  # rows of the bias are longer than it
        case((2, 4, 2, 333, 441), 0, 1, 1, 1, pad=7)
        self.needs_and_repeats()
        case(some, 1, 1, 1, 1, refused=True, mask=(1, 1, 333, 448))
        case((2, 4, 2, 333, 441), 1, 1, 1, 1, refused=True)

    def apart(self) -> None:
        """A bias by pairs in fp32, a mask by pairs."""
        if self.hopper and self.dim > 128:
            return  # sm80's
        d, case, fp32 = self.dim, self.with_bias, {"bias_dtype": torch.float32}
        for sizes in [(1, 2, 2, 128, 128), (2, 4, 4, 512, 512), (1, 2, 1, 200, 332), (3, 6, 2, 300, 1000), (1, 2, 2, 2, 80), (2, 2, 2, 1500, 1412)]:  # fmt: skip
            for (window, lower_right), batch in itertools.product(WINDOWS[:5], (1, 0)):
                case(sizes, batch, 1, 1, 1, window=window, lower_right=lower_right, hidden=0.1, **fp32)  # fmt: skip
        for shape in [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1)]:
            for sizes in [(3, 4, 2, 257, 268), (2, 6, 6, 640, 384), (40, 4, 4, 384, 384)]:
                self.shared(sizes, *shape, **fp32)
        for dims in [(d - 56, d - 56), (d - 8, d), (d, d - 56), (d - 40, d - 40)]:
            for batch in (0, 1):
                case((2, 4, 2, 333, 444), batch, 1, 1, 1, dims=dims, window=(50, 70), **fp32)
        odd = (2, 4, 2, 333, 441)
        case(odd, 1, 1, 1, 1, pad=3, need=7, **fp32)  # rows of the bias are longer than it
        case(odd, 1, 1, 1, 1, pad=3, refused=True, **fp32)  # nothing for rows of its gradient
        case(odd, 0, 1, 1, 1, pad=3, **fp32)  # sm80's kernel sums
        case(odd, 1, 1, 1, 1, refused=True, **fp32)
        self.needs_and_repeats(shared=True, **fp32)
        for b, h, sq, sk, shape in [(2, 4, 333, 448, (1, 1)), (2, 4, 200, 336, (2, 1)), (2, 4, 64, 16, (2, 4)), (1, 2, 1500, 1424, (1, 2)), (3, 6, 257, 272, (1, 6))]:  # fmt: skip
            sizes = (b, h, h // 2, sq, sk)
            for window, lower_right in WINDOWS[:3]:
                options: dict[str, Any] = {"mask": (*shape, sq, sk), "window": window, "lower_right": lower_right}  # fmt: skip
                case(sizes, **options)
                case(sizes, 1, 0, 0, 1, **options)
                for batch in {0, 1} if b > 1 else {1}:
                    case(sizes, batch, 1, 1, 1, hidden=0.1, refused=d > 64, **options, **fp32)
        case(odd, mask=(2, 1, 333, 441), refused=True)

    def shared(self, sizes: Sizes, *shape: int, **options: Any) -> None:
        self.with_bias(sizes, *shape, **options)
        self.with_bias(sizes, *shape, hidden=0.3, window=(-1, 0), lower_right=True, **options)
        for need in (7, 8):
            self.with_bias(sizes, *shape, need=need, **options)
        self.with_bias(sizes, *shape, mask=(sizes[0], 1, 1, sizes[4]), **options)

    def needs_and_repeats(self, shared: bool = False, **options: Any) -> None:
        for need, batch in itertools.product((1, 2, 4, 9, 14), (1, 0) if shared else (1,)):
            self.with_bias((2, 4, 2, 333, 448), batch, 1, 1, 1, need=need, **options)
        for window in ((-1, -1), (-1, 0)):
            self.with_bias((2, 8, 8, 1024, 1024), 1, 1, 1, 1, window=window, repeats=50, **options)
            self.with_bias((2, 4, 2, 1500, 1408), 0, 1, 1, 1, window=window, repeats=10, **options)


SECTIONS = ("dense", "values", "turns", "softcap", "pairs", "apart", "packed")


if __name__ == "__main__":
    raise SystemExit(exact.main(__doc__, "backward", Check, SECTIONS, "64,96,128,192,256"))
