"""Generated problems for paged attention, and their judge.

A paged call is a packed one whose keys are stored elsewhere: :meth:`PagedInputs.packed` gathers them, and the
ordinary :class:`flashsci.testing.Judge` decides which results are right. Two parts of the packed call are written so
that they stay exact. The scales of an 8-bit cache are powers of two, except for one common factor of K, which is a
factor of the scores. A sink is one more key of zeros, and its value is the bias of that key.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashsci.testing.blocks import visible_pairs
from flashsci.testing.bounds import PLAIN, Finding, Judge
from flashsci.testing.choices import Choices, SeededChoices, strategy_of
from flashsci.testing.inputs import Inputs
from flashsci.testing.poison import embed

LAYOUTS = ("rows", "heads", "joint rows", "joint heads", "stacked", "unaligned")
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (96, 64), (40, 24))
PAGES = (16, 32, 48, 64, 128)
# Entries of a block table that no key needs.
GARBAGE = (-1, -(2**31), 2**31 - 1, 12345)


@dataclass(frozen=True)
class PagedVariant:
    """The properties that kernels are compiled for."""

    dtype: str = "float32"
    cache: str = ""  # an 8-bit float; "": dtype
    head_dim: int = 64
    head_dim_v: int = 64
    window: str = "causal"  # "none", "left": causal and a left side, "both"
    softcap: bool = False
    sink: bool = False


@dataclass(frozen=True)
class PagedCase:
    """One problem as pure data: seeded, hashable, printable as the reproducer of a failure."""

    variant: PagedVariant = field(default_factory=PagedVariant)
    seed: int = 0
    lens_q: tuple[int, ...] = (1,)
    lens_k: tuple[int, ...] = (17,)
    heads_k: int = 1
    group: int = 1  # query heads per key head
    page: int = 16
    layout: str = "rows"  # of the caches, one of LAYOUTS
    spare_pages: int = 0  # columns of the block table beyond the longest sequence
    shared: bool = False  # later sequences begin with the pages of the first
    outside: bool = False  # some needed entries of the table are out of range
    padding: int = 0  # rows of q after the last sequence
    known_length: bool = True  # max_seqlen_q is given
    scales: str = "none"  # "one": a number each; "heads": [N, Hk]
    left: int = 20  # sides of the window, where it has them
    right: int = 3
    scale: float | None = None
    sharp: float = 1.0  # a factor of q: large scores

    @property
    def heads_q(self) -> int:
        return self.heads_k * self.group

    @property
    def compiled(self) -> tuple[PagedVariant, bool, bool]:
        """The properties that kernels are compiled for, except lengths: cases with equal ones share most kernels."""
        return self.variant, self.layout == "unaligned", self.scales != "none"

    @property
    def scores(self) -> int:
        return self.heads_q * sum(q * k for q, k in zip(self.lens_q, self.lens_k, strict=True))


@dataclass
class PagedInputs:
    """The tensors and options of one call of :func:`flashsci.paged_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any]  # the keyword arguments

    def evaluate(self, backend: str, **options: Any) -> dict[str, Tensor]:
        """out and lse of this backend, never of another."""
        import flashsci

        with flashsci.use_backend(backend, strict=True):
            given = dict(self.options, return_lse=True, backend=backend) | options
            found = flashsci.paged_attention(self.q, self.k_cache, self.v_cache, **given)
        return dict(zip(("out", "lse"), found, strict=True))

    @property
    def edges(self) -> list[int]:
        edges: list[int] = self.options["cu_seqlens_q"].tolist()
        return edges

    def rows(self, n: int, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows in a cache of sequence n from its first visible key on, ``[keys, Hk, D]``, not scaled."""
        j = visible_keys(
            self.edges[n + 1] - self.edges[n],
            int(self.options["seqused_k"][n]),
            (self.options["window"] or (None,))[0],
        ).to(cache.device)
        pages = self.options["block_table"][n, j // cache.shape[1]].long()
        where = pages.clamp(0, cache.shape[0] - 1), j % cache.shape[1]
        if cache.dtype.itemsize > 1:
            return cache[where].to(dtype)
        return cache.view(torch.uint8)[where].view(cache.dtype).to(dtype)

    def packed(self) -> Inputs:
        """The same attention as a packed call, with keys and values gathered and in q's dtype."""
        given, dtype = self.options, self.q.dtype
        edges = self.edges
        k_scale, v_scale = given.get("k_scale"), given.get("v_scale")
        common = 1.0 if k_scale is None else k_scale.flatten()[0].item()
        extra = given.get("sink") is not None
        keys, values, biases = [], [], []
        for n in range(len(edges) - 1):
            k = self.rows(n, self.k_cache, dtype) * _row(k_scale, n, common).to(self.q)
            v = self.rows(n, self.v_cache, dtype) * _row(v_scale, n, 1.0).to(self.q)
            keys.append(pad(k, (0, 0, 0, 0, 0, int(extra))))
            values.append(pad(v, (0, 0, 0, 0, 0, int(extra))))
            if extra:
                biases.append(self._sink_bias(edges[n + 1] - edges[n], len(k)))
        options: dict[str, Any] = {"softcap": given.get("softcap"), "align": "lower_right"}
        scale = given.get("scale")
        options["scale"] = (self.q.shape[-1] ** -0.5 if scale is None else scale) * common
        if not extra:
            options |= {"causal": given["causal"], "window": given["window"]}
        lengths = torch.tensor([len(k) for k in keys], device=self.q.device)
        return Inputs(
            self.q[: edges[-1]],
            torch.cat(keys),
            torch.cat(values),
            bias=torch.cat(biases, 1) if extra else None,
            cu_seqlens_q=given["cu_seqlens_q"],
            cu_seqlens_k=pad(lengths.cumsum(0), (1, 0)).int(),
            options=options,
        )

    def _sink_bias(self, length_q: int, length_k: int) -> Tensor:
        """fp32 ``[Hq, Lq * (Lk + 1)]``: causal and window as -inf, and the sink after the last key."""
        device = self.q.device
        window = {n: self.options[n] for n in ("causal", "window")} | {"align": "lower_right"}
        visible = visible_pairs(length_q, length_k, window, device)
        hidden = torch.zeros(visible.shape, device=device).masked_fill(~visible, -torch.inf)
        sink = self.options["sink"].float()[:, None, None].expand(-1, length_q, 1)
        return torch.cat((hidden.expand(len(sink), -1, -1), sink), -1).flatten(1)

    def written(self, backend: str) -> Tensor:
        """The bytes of new caches, keys and values in one row, after a backend has written random tokens into them."""
        import flashsci

        random = torch.Generator().manual_seed(0)
        pages, page, heads = self.k_cache.shape[:3]
        dims, device = (self.k_cache.shape[-1], self.v_cache.shape[-1]), self.q.device
        joint = torch.zeros(pages, heads, page, sum(dims), device=device).to(self.k_cache.dtype)
        slots = torch.randperm(pages * page, generator=random)[: pages * page // 2 + 1]
        slots[::7] = torch.tensor((-1, pages * page, -(2**40), 2**40)).repeat(len(slots))[: len(slots[::7])]
        new = 100 * torch.randn(len(slots) + 1, heads, sum(dims), generator=random)
        key, value = new.to(device, self.q.dtype).split(dims, -1)
        scales = {n: s[0] if s.dim() == 2 else s for n, s in self.options.items() if n in ("k_scale", "v_scale")}
        k_cache, v_cache = joint.transpose(1, 2).split(dims, -1)
        flashsci.write_kv_cache(key, value, k_cache, v_cache, slots.to(device), **scales, backend=backend)
        return joint.view(torch.uint8)

    def judge(self, fused: bool) -> PagedJudge:
        return PagedJudge(self, fused)


def visible_keys(queries: int, length: int, left: int | None) -> Tensor:
    """Positions of the keys right of the window's left side, for at least one query."""
    first = 0 if left is None else max(0, length - queries - left)
    return torch.arange(min(first, length), length)


def _row(scale: Tensor | None, n: int, common: float) -> Tensor:
    """The scales of sequence n divided by ``common``, ``[1 or Hk, 1]``."""
    if scale is None:
        return torch.ones(1, 1)
    return (scale if scale.dim() < 2 else scale[n]).reshape(-1, 1) / common


class PagedJudge:
    """Truth and allowances of one paged call; it judges any number of results for the call.

    Examples:
        >>> from flashsci.testing import PagedCase, make_paged_inputs
        >>> inputs = make_paged_inputs(PagedCase(lens_q=(1, 3), lens_k=(40, 3)))
        >>> inputs.judge(fused=False).require(inputs.evaluate("reference"))
    """

    def __init__(self, inputs: PagedInputs, fused: bool):
        self.total = inputs.edges[-1]
        self.judge = Judge(inputs.packed(), fused)

    def problems(self, results: dict[str, Tensor]) -> list[str]:
        """The faults of out and lse, rows of no sequence included."""
        out, lse = results["out"], results["lse"]
        problems = [f.problem for f in self.findings(results) if f.problem]
        if out[self.total :].any() or not bool((lse[:, self.total :] == -torch.inf).all()):
            problems.append("rows of no sequence must have out 0 and lse -inf")
        return problems

    def findings(self, results: dict[str, Tensor]) -> list[Finding]:
        """The findings on out and lse in the rows that belong to sequences."""
        return self.judge.findings(self.part(results))

    def part(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows that belong to sequences."""
        return {"out": results["out"][: self.total], "lse": results["lse"][:, : self.total]}

    def require(self, results: dict[str, Tensor]) -> None:
        """Raise AssertionError with every failure."""
        problems = self.problems(results)
        assert not problems, "\n".join(problems)


def judge_paged(case: PagedCase, backend: str, device: torch.device | str = "cpu") -> None:
    """Run one case on a backend; require the two-error rule for out and lse, and the reference's bytes in a written
    cache.

    Raises:
        AssertionError: a wrong result, with the case.
        BackendError: the backend cannot serve the call.
    """
    inputs = make_paged_inputs(case, device)
    problems = inputs.judge(backend not in PLAIN).problems(inputs.evaluate(backend))
    if not torch.equal(inputs.written(backend), inputs.written("reference")):
        problems.append("write_kv_cache stores other bytes than the reference")
    assert not problems, "\n".join([*problems, repr(case)])


def make_paged_inputs(case: PagedCase, device: torch.device | str = "cpu") -> PagedInputs:
    """The tensors of a case: values depend only on the case; unused places are NaN or, in the block table,
    garbage."""
    random = torch.Generator().manual_seed(case.seed)
    variant = case.variant
    dtype = getattr(torch, variant.dtype)
    cache_dtype = getattr(torch, variant.cache or variant.dtype)
    table, pages = _table(case, random)
    used = torch.zeros(pages * case.page, dtype=torch.bool)
    for n, length in enumerate(case.lens_k):
        j = visible_keys(case.lens_q[n], length, _left(case))
        used[table[n, j // case.page].long().clamp(0, pages - 1) * case.page + j % case.page] = True

    def cache(width: int) -> Tensor:
        x = torch.randn(pages * case.page, case.heads_k, width, generator=random)
        x[~used] = torch.nan
        return x.view(pages, case.page, case.heads_k, width).to(cache_dtype).to(device)

    k_cache, v_cache = _laid_out(cache(variant.head_dim), cache(variant.head_dim_v), case.layout)
    total = sum(case.lens_q)
    q = case.sharp * torch.randn(total, case.heads_q, variant.head_dim, generator=random)
    q = pad(q, (0, 0, 0, 0, 0, case.padding), value=torch.nan).to(dtype).to(device)
    edges = torch.tensor([0, *itertools.accumulate(case.lens_q)], dtype=torch.int32)
    options: dict[str, Any] = {
        "block_table": embed(table.to(device)),
        "seqused_k": embed(torch.tensor(case.lens_k, dtype=torch.int32, device=device)),
        "cu_seqlens_q": embed(edges.to(device)),
        "max_seqlen_q": max(case.lens_q) if case.known_length else None,
        "scale": case.scale,
        "softcap": 5.0 if variant.softcap else None,
    } | _window(case)
    if variant.sink:
        sink = 2 * torch.randn(case.heads_q, generator=random)
        sink[0] = 30.0 if case.seed % 2 else -torch.inf  # all of the probability, or none
        options["sink"] = sink.to(device)
    if case.scales != "none":
        shape = () if case.scales == "one" else (len(case.lens_q), case.heads_k)
        powers = torch.randint(-2, 3, (2, *shape), generator=random).float().exp2().to(device)
        options |= {"k_scale": 0.37 * powers[0], "v_scale": powers[1]}
    # A view of the projection of q, k, v together.
    return PagedInputs(embed(q, pad={1: 2 * case.heads_k}), k_cache, v_cache, options)


def _window(case: PagedCase) -> dict[str, Any]:
    window = {
        "none": None,
        "causal": None,
        "left": (case.left, None),
        "both": (case.left, case.right),
    }
    kind = case.variant.window
    return {"causal": kind in ("causal", "left"), "window": window[kind]}


def _left(case: PagedCase) -> int | None:
    return case.left if case.variant.window in ("left", "both") else None


def _table(case: PagedCase, random: torch.Generator) -> tuple[Tensor, int]:
    """(block table with garbage in unneeded entries, number of pages)."""
    needed = [-(-length // case.page) for length in case.lens_k]
    pages = sum(needed) + 2  # one at each end, which clamped entries reach
    order = (torch.randperm(pages - 2, generator=random) + 1).to(torch.int32)
    columns = max(1, max(needed) + case.spare_pages)
    choices = torch.randint(0, len(GARBAGE), (len(needed), columns), generator=random)
    table = torch.tensor(GARBAGE, dtype=torch.int64)[choices].to(torch.int32)
    first = 0
    for n, count in enumerate(needed):
        table[n, :count] = order[first : first + count]
        first += count
        if case.shared and n:
            common = min(needed[0], count)
            table[n, :common] = table[0, :common]
        seen = visible_keys(case.lens_q[n], case.lens_k[n], _left(case))
        if len(seen):  # pages left of every window may be free
            table[n, : int(seen[0]) // case.page] = GARBAGE[n % len(GARBAGE)]
        if case.outside and count:
            table[n, count // 2] = (-7, pages + 1000)[n % 2]
    return table, pages


def _laid_out(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The caches ``[pages, page, Hk, .]`` in the memory layout of that name, between poison."""
    width = k.shape[-1]
    if layout in ("joint rows", "joint heads"):
        order = (0, 1, 2, 3) if layout == "joint rows" else (0, 2, 1, 3)
        joint = embed(torch.cat((k.float(), v.float()), -1).to(k.dtype), order)
        return joint[..., :width], joint[..., width:]
    if layout == "stacked":  # pages of keys and values in turn
        return embed(k, pad={0: 0, 1: k.shape[1]}), embed(v, pad={1: k.shape[1]})
    if layout == "unaligned":
        return embed(k, pad={2: 1}, offset=1), embed(v, pad={3: 1}, offset=3)
    order = (0, 1, 2, 3) if layout == "rows" else (0, 2, 1, 3)
    return embed(k, order), embed(v, order)


@functools.cache
def paged_variants(count: int = 32) -> tuple[PagedVariant, ...]:
    """The bounded set of variants that generated cases draw from, the same everywhere."""
    choices = SeededChoices(20261123)
    found: dict[PagedVariant, None] = {}
    while len(found) < count:
        dtype = choices.one_of(("float16", "bfloat16", "bfloat16", "float32"))
        head_dim, head_dim_v = choices.one_of(HEAD_DIMS)
        found[
            PagedVariant(
                dtype,
                choices.one_of(("", "", "float8_e4m3fn", "float8_e5m2")),
                head_dim,
                head_dim_v,
                choices.one_of(("none", "causal", "causal", "left", "both")),
                choices.one_of((False, False, True)),
                choices.one_of((False, False, True)),
            )
        ] = None
    return tuple(found)


def draw_paged(
    choices: Choices,
    pool: tuple[PagedVariant, ...] | None = None,
    longest_k: int = 700,
    longest_q: int = 150,
) -> PagedCase:
    """A case from choices: decode, speculative decode, prefill of whole prompts or of chunks, or a mixture of all."""
    kind = choices.one_of(("decode", "few", "prefill", "mixed", "mixed"))
    lens_q, lens_k = [], []
    for _ in range(choices.integer(1, 6)):
        used = choices.one_of((0, 1, 15, 16, 17, choices.integer(1, longest_k), choices.integer(1, longest_k)))
        new = {
            "decode": 1,
            "few": choices.integer(1, 8),
            "prefill": min(used, longest_q),
            "mixed": choices.one_of((0, 1, 1, choices.integer(0, longest_q))),
        }[kind]
        lens_q.append(new)
        # More queries than keys are allowed, and the first of them see nothing.
        lens_k.append(used if choices.integer(0, 4) == 0 else max(used, new))
    variant = choices.one_of(paged_variants() if pool is None else pool)
    return PagedCase(
        variant=variant,
        seed=choices.integer(0, 2**31 - 1),
        lens_q=tuple(lens_q),
        lens_k=tuple(lens_k),
        heads_k=choices.one_of((1, 2, 3)),
        group=choices.one_of((1, 2, 3, 4, 5, 8)),
        page=choices.one_of(PAGES),
        layout=choices.one_of(LAYOUTS),
        spare_pages=choices.integer(0, 5),
        shared=choices.one_of((False, True)),
        outside=choices.integer(0, 3) == 0,
        padding=choices.one_of((0, 0, 1, 40)),
        known_length=choices.one_of((False, True)),
        scales=choices.one_of(("none", "one", "heads")),
        left=choices.one_of((0, 1, 20, 100)),
        right=choices.one_of((0, 3)),
        scale=choices.one_of((None, None, 0.3)),
        sharp=choices.one_of((1.0, 1.0, 8.0)),
    )


def generate_paged(seed: int, count: int, **limits: Any) -> Iterator[PagedCase]:
    """``count`` cases of a seeded generator; ``limits`` as in :func:`draw_paged`."""
    choices = SeededChoices(seed)
    for _ in range(count):
        yield draw_paged(choices, **limits)


def paged_cases(**limits: Any) -> Any:
    """A Hypothesis strategy of whole cases (needs hypothesis)."""
    return strategy_of(lambda choices: draw_paged(choices, **limits))
