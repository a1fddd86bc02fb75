"""Cases of raw forward launchers that `python -m flashsci check` does not have: long rows of few queries, scores that grow from block
to block until exp2 overflows, rows of nobody, every broadcast of bias and mask, repeats. 16-bit units, against fp64. Needs a GPU.

    python -m tools.check_forward new=new.so --dims 64,128 --only packed,pairs
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tools import exact
from tools.exact import WINDOWS, Record, attention, bound, make, poisoned
from tools.launchers import Build


class Check:
    """The cases of one build, dtype and bucket of head dims."""

    def __init__(self, build: Build, dtype: torch.dtype, dim: int, record: Record):
        self.build, self.dtype, self.dim, self.record = build, dtype, dim, record
        self.dim_v = dim

    def tensors(self, b: int, h: int, hk: int, sq: int, sk: int, d: int, dv: int, layout: str = "bshd"):  # fmt: skip
        shapes = ((b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv))
        return [make(shape, self.dtype, layout) for shape in shapes]

    def launched(self, name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """(out, lse), or None after a failure."""
        with poisoned():
            run, out, lse = self.build.forward_launch(q, k, v, **options)
        return (out, lse) if self.record.launch(name, run) else None

    def compare(self, name: str, found: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:  # fmt: skip
        if found is None:
            return
        out, lse = found
        want, want_lse = attention(q, k, v, **options)
        base, _ = attention(q, k, v, self.dtype, **options)
        self.record.within(name, [("out", out, want, bound(base, want, want.abs().max().item()))])
        finite = torch.isfinite(want_lse)
        error = (lse.double() - want_lse)[finite].abs().max().item() if finite.any() else 0.0
        if not torch.equal(torch.isfinite(lse), finite) or lse.isnan().any() or not error < 1e-3:
            self.record.fail(name, f"lse error {error:.1e}, or not finite in other rows")

    def case(self, name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        shapes = " ".join(str(tuple(x.shape)) for x in (q, k, v))
        shown = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in options.items()}
        name = f"{self.build.name} {self.dtype} {name} {shapes} {shown}"
        self.compare(name, self.launched(name, q, k, v, **options), q, k, v, **options)

    def dense(self) -> None:
        d = self.dim
        sizes = [(2, 4, 4, 512, 512), (1, 2, 1, 200, 333), (2, 3, 3, 1, 77), (1, 4, 2, 777, 129), (1, 1, 1, 64, 1), (3, 6, 2, 300, 1000),
                 (40, 8, 4, 321, 321), (1, 2, 2, 2500, 2411)]  # fmt: skip
        for size, (window, lower_right) in itertools.product(sizes, WINDOWS):
            self.case("dense", *self.tensors(*size, d, d), window=window, lower_right=lower_right)
        low = d // 2 + 8 if d > 64 else 8
        some = (2, 4, 2, 333, 444)
        for dq, dv in [(low, low), (d - 8, d), (d, low), (d - 16, d - 16), (8, d)]:
            for window, lower_right in (((-1, 0), True), ((-1, -1), False)):
                q, k, v = self.tensors(*some, dq, dv, "bhsd")
                self.case("dense", q, k, v, window=window, lower_right=lower_right)
        self.case("softcap", *self.tensors(*some, d, d, "bhsd"), window=(-1, 0), softcap=3.0)
        for scale in (-0.3, 0.0):
            self.case("scale", *self.tensors(*some, d, d, "bhsd"), scale=scale)
        self.case("scale", *self.tensors(1, 2, 2, 1000, 1000, d, d), window=(-1, 0), scale=3.0)

    def values(self) -> None:
        """Values with a head dim of their own."""
        for self.dim_v in (40, 128, 200):
            for size, (window, lower_right) in itertools.product([(2, 4, 2, 333, 444), (1, 2, 2, 2500, 2411)], WINDOWS):  # fmt: skip
                tensors = self.tensors(*size, self.dim, self.dim_v)
                for softcap in (0.0, 3.0):
                    self.case("values", *tensors, window=window, lower_right=lower_right, softcap=softcap)  # fmt: skip
            self.growing()
            self.packed()

    def growing(self) -> None:
        """Scores that grow from block to block (right to left), up to overflow of exp."""
        for factor, (window, lower_right), what, softcap in itertools.product(
            (3.0, 12.0, 60.0), [WINDOWS[0], WINDOWS[2], ((400, 100), False)], ("ramp", "sink"), (0.0, 30.0)
        ):  # fmt: skip
            q, k, v = self.tensors(1, 4, 2, 700, 1111, self.dim, self.dim_v)
            if what == "ramp":
                k *= torch.linspace(factor, 0.1, 1111, device=k.device).to(self.dtype)[:, None]
            else:
                k[..., :3, :] = q[:, ::2, 5:8] * (factor / 3)
            self.case(f"{what} {factor}", q, k, v, window=window, lower_right=lower_right, softcap=softcap)  # fmt: skip

    def strided(self) -> None:
        """Two batch dims, rows of a joint projection, K and V broadcast."""
        d = self.dim
        q = make((2, 3, 260, 4, d + 64), self.dtype)[..., :d].permute(0, 1, 3, 2, 4)
        k = make((1, 3, 2, 290, d), self.dtype).expand(2, 3, 2, 290, d)
        v = make((3, 2, 400, d), self.dtype)
        v[:, :, :50] = v[:, :, 340:] = float("nan")
        v = v[:, :, 50:340].unsqueeze(0).expand(2, 3, 2, 290, d)
        self.case("strided", q, k, v, window=(-1, 0), lower_right=True)

    def packed(self) -> None:
        """NaN neighbours in sequences of their own, empty and one-row sequences, rows of nobody."""
        lens_q = [0, 1, 130, 63, 64, 0, 400, 193, 7, 128]
        lens_k = [5, 1, 77, 64, 200, 9, 300, 0, 129, 128]
        poison = 4
        for window, lower_right in (WINDOWS[0], WINDOWS[2], ((40, 20), False)):
            cu = tuple(
                torch.tensor([3, *lens], device=exact.DEVICE).cumsum(0).int()
                for lens in (lens_q, lens_k)
            )
            total_q, total_k = sum(lens_q) + 8, sum(lens_k) + 9
            q = make((6, total_q, self.dim), self.dtype, "bshd")
            k, v = (make((2, total_k, d), self.dtype, "bshd") for d in (self.dim, self.dim_v))
            for x in (k, v):
                x[:, cu[1][poison] : cu[1][poison + 1]] = float("nan")
                x[:, :3] = x[:, cu[1][-1] :] = float("nan")
            name = f"{self.build.name} {self.dtype} packed d{self.dim}/{self.dim_v} {window} {lower_right}"
            options = {"window": window, "lower_right": lower_right}
            found = self.launched(name, q, k, v, cu=cu, **options)
            if found is None:
                continue
            out, lse = found
            starts_q, starts_k = (x.tolist() for x in cu)
            nobody = [slice(0, 3), slice(starts_q[-1], total_q)]
            for n, (rows, keys) in enumerate(zip(lens_q, lens_k, strict=True)):
                at, of = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
                if not keys:
                    nobody.append(at)
                elif rows and n != poison:
                    part = (out[:, at], lse[:, at])
                    self.compare(f"{name} sequence {n}", part, q[:, at], k[:, of], v[:, of], **options)  # fmt: skip
            for at in nobody:
                if not ((out[:, at] == 0).all() and (lse[:, at] == float("-inf")).all()):
                    self.record.fail(f"{name}: rows {at} without keys")

    def pairs(self) -> None:
        """Bias and mask, in every shape."""
        d = self.dim
        for b, h, hk, sq, sk, dq in [(2, 4, 4, 384, 384, d), (1, 4, 2, 200, 336, d), (3, 2, 1, 65, 1024, max(d - 40, 8)),
                                     (2, 2, 2, 700, 96, d - 8), (1, 2, 2, 1, 16, d)]:  # fmt: skip
            for n, (shape, kind) in enumerate([
                ((b, h, sq, sk), "bias"), ((1, h, sq, sk), "fp32"), ((b, 1, 1, sk), "bias"), ((b, 1, 1, sk), "mask"), ((1, 1, sq, sk), "mask"),
                ((b, h, sq, sk), "both"), ((1, 1, 1, sk), "fp32 both"), ((b, h, sq, sk), "inf"), ((b, 1, 1, sk), "least"),
            ]):  # fmt: skip
                q, k, v = self.tensors(b, h, hk, sq, sk, dq, dq)
                bias = mask = None
                if kind != "mask":
                    bias = make(shape, torch.float32 if "fp32" in kind else self.dtype)
                    bias *= 3
                if kind == "inf":  # padding on the right, a few rows without keys
                    bias[..., sk * 2 // 3 :] = float("-inf")
                    bias[..., : sq // 3, :] = float("-inf")
                if kind == "least":  # as finfo.min pads
                    bias[..., sk // 2 :] = torch.finfo(bias.dtype).min
                if kind == "mask" or "both" in kind:
                    mask = torch.rand((b, 1, sq if n == 4 else 1, sk), device=q.device) < 0.6
                    mask[0] &= torch.arange(sk, device=q.device) < sk // 2
                    if n == 4:
                        mask[..., : sq // 2, :] = False
                if (
                    mask is not None
                    and dq <= 32
                    and self.build.folders["forward", self.dtype] == "sm90"
                ):  # sm80's
                    continue
                window, lower_right = (WINDOWS[0], WINDOWS[2], ((50, 20), False))[n % 3]
                if kind == "least":  # where every row has a key: it counts as -inf
                    window, lower_right = WINDOWS[0]
                self.case(f"pairs {kind}", q, k, v, bias=bias, mask=mask, window=window, lower_right=lower_right,
                          softcap=20.0 if n == 5 else 0.0, scale=-0.2 if n == 6 else None)  # fmt: skip

    def decode(self) -> None:
        """Few queries, many keys."""
        d = self.dim
        for b, h, hk, sq, sk, dq, dv in [(1, 8, 2, 1, 5000, d, d), (3, 4, 4, 1, 300, d, d - 8), (5, 32, 8, 1, 2000, d - 24, d), (2, 14, 2, 3, 777, d, d),
                                         (40, 16, 4, 16, 515, d, d), (2, 3, 3, 64, 1000, d, d), (150, 2, 1, 2, 400, d, d)]:  # fmt: skip
            for (window, lower_right), softcap in zip(
                (WINDOWS[0], WINDOWS[2], ((100, 0), True), WINDOWS[1]), (0.0, 0.0, 25.0, 0.0), strict=True
            ):  # fmt: skip
                q, k, _ = self.tensors(b, h, hk, sq, sk, dq, dv)
                v = make((b, hk, sk, dv), self.dtype)
                self.case(
                    "decode", q, k, v, window=window, lower_right=lower_right, softcap=softcap
                )

    def repeats(self) -> None:
        q, k, v = self.tensors(4, 8, 8, 1111, 1111, self.dim, self.dim)
        for window in ((-1, -1), (-1, 0)):
            name = f"{self.build.name} {self.dtype} repeats d{self.dim} {window}"
            with poisoned():
                run, out, lse = self.build.forward_launch(q, k, v, window=window)
            if self.record.launch(name, run):
                self.record.repeats(name, run, [out, lse], 200)


SECTIONS = ("dense", "values", "growing", "strided", "packed", "pairs", "decode", "repeats")


if __name__ == "__main__":
    raise SystemExit(exact.main(__doc__, "forward", Check, SECTIONS, "64,96,128,192,256"))
