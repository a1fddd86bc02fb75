"""Known traps of attention kernels, each a named test: `TRAPS[name](backend, device)`.

The GPU suite, `python -m flashsci check` and, for traps that are fast enough in the interpreter, the CPU suite run
the same functions. A trap raises AssertionError when a backend falls into it, BackendError when the backend refuses
all of its calls, and :class:`Skipped` when the machine lacks something it needs. If a backend refuses only some
calls, it is judged by the others: a generation of CUDA kernels has few dtypes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashsci.errors import BackendError
from flashsci.testing.bounds import PLAIN, Judge
from flashsci.testing.cases import Case, Variant
from flashsci.testing.evaluation import check_alone, evaluate
from flashsci.testing.inputs import Inputs
from flashsci.testing.making import make_inputs
from flashsci.testing.poison import poisoned_memory


class Skipped(Exception):
    """This machine lacks something that a trap needs; the message names it."""


@dataclass(frozen=True)
class Trap:
    """One named trap.

    ``cuda``: it makes no sense on the CPU; ``gigabytes``: device memory it takes; ``slow``: too large for Triton's
    interpreter; ``order``: 2 if it is about second derivatives; ``one_of``: dtypes, of which ``run`` gets the first
    that the backend takes, as a third argument.
    """

    name: str
    run: Callable[..., None]
    cuda: bool = False
    gigabytes: int = 0
    slow: bool = False
    order: int = 1
    one_of: tuple[str, ...] = ()

    def __call__(self, backend: str, device: torch.device | str) -> None:
        device = torch.device(device)
        if self.cuda and device.type != "cuda":
            raise Skipped("needs a CUDA device")
        if self.gigabytes and torch.cuda.mem_get_info(device)[1] < self.gigabytes << 30:
            raise Skipped(f"needs {self.gigabytes} GiB of device memory")
        if not self.one_of:
            self.run(backend, device)
        for dtype in self.one_of:
            try:
                return self.run(backend, device, dtype)
            except BackendError:
                if dtype == self.one_of[-1]:
                    raise


TRAPS: dict[str, Trap] = {}


def trap(**needs: Any) -> Callable[[Callable[..., None]], Trap]:
    def register(run: Callable[..., None]) -> Trap:
        TRAPS[run.__name__] = Trap(run.__name__, run, **needs)
        return TRAPS[run.__name__]

    return register


DTYPES = ("bfloat16", "float16", "float32")
HALVES = ("bfloat16", "float16")  # Turing's kernels have only the second


def each_served(parts: Iterable[Callable[[], None]]) -> None:
    """Run the parts of a trap separately; parts that the backend refuses are left out.

    Raises:
        BackendError: it refuses all of them.
    """
    refusal: BackendError | None = None
    served = 0
    for part in parts:
        try:
            part()
            served += 1
        except BackendError as error:
            refusal = error
    if not served and refusal is not None:
        raise refusal


def judged(
    backend: str, device: torch.device, *cases: Case, dtypes: Sequence[str] = DTYPES
) -> list[Callable[[], None]]:
    """Parts of a trap: every case in every dtype, in poisoned memory, by all criteria."""

    def judge(case: Case, dtype: str) -> None:
        inputs = make_inputs(replace(case, variant=replace(case.variant, dtype=dtype)), device)
        with poisoned_memory():
            results = evaluate(inputs, backend, deterministic=False)
            if inputs.dout is not None and backend not in PLAIN:
                check_alone(inputs, backend, results)
        Judge(inputs, backend not in PLAIN).require(results)

    return [functools.partial(judge, c, t) for c, t in itertools.product(cases, dtypes)]


def require(backend: str, device: torch.device, *cases: Case, dtypes: Sequence[str] = DTYPES) -> None:
    """Require all criteria for every case in every dtype that the backend takes.

    Raises:
        BackendError: it takes none.
    """
    each_served(judged(backend, device, *cases, dtypes=dtypes))


def _randn(*shape: int, device: torch.device, dtype: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=getattr(torch, dtype))


def _close(found: Tensor, truth: Tensor, what: str) -> None:
    """Require agreement within 4 roundings of the largest value: for parts of results too large for a Judge."""
    error = (found.double() - truth.double()).abs().max().item()
    limit = 4 * torch.finfo(found.dtype).eps * truth.double().abs().max().item()
    assert error <= limit, f"{what}: error {error:.3g} > {limit:.3g}"


@trap(slow=True)
def masked_tail_with_lse_below_fp32_exp(backend: str, device: torch.device) -> None:
    """Sequence % 128 == 64, a key mask, every row's lse below -88.7 (pytorch#196678: NaN)."""
    case = Case(seed=1, lead=(2,), heads_k=2, seq_q=192, seq_k=192, magnitude="low")
    case = replace(case, variant=Variant(head_dim=64, head_dim_v=64, mask=True, lse_grad=True))
    keys = replace(case, mask_shape=(2, 1, 1, 192), mask_kind="keys")
    rows = replace(case, mask_shape=(2, 1, 192, 192), mask_kind="rows")
    parts = judged(backend, device, keys), judged(backend, device, rows, dtypes=("bfloat16",))
    each_served(itertools.chain(*parts))


@trap()
def fully_masked_rows(backend: str, device: torch.device) -> None:
    """A row without keys: out 0, lse -inf, zero gradients, exactly."""
    case = Case(
        seed=2,
        variant=Variant(mask=True, bias="pair", bias_grad=True, lse_grad=True),
        lead=(2,),
        heads_k=2,
        seq_q=19,
        seq_k=33,
        mask_shape=(2, 1, 19, 1),
        mask_kind="rows",
        bias_shape=(4, 19, 33),
        group=2,
    )
    require(backend, device, case, replace(case, mask_kind="none"))

    def exactly(dtype: str) -> None:
        inputs = make_inputs(replace(case, variant=replace(case.variant, dtype=dtype)), device)
        found = evaluate(inputs, backend)
        assert inputs.mask is not None
        hidden = ~inputs.mask.expand(*found["lse"].shape, 1)
        assert hidden.any() and not hidden.all()
        assert found["out"].masked_select(hidden).eq(0).all()
        assert found["dq"].masked_select(hidden).eq(0).all()
        assert found["lse"].masked_select(hidden[..., 0]).eq(-torch.inf).all()

    dtypes = DTYPES if device.type == "cuda" else ("float32",)
    each_served(functools.partial(exactly, dtype) for dtype in dtypes)


@trap()
def minus_infinity_in_bias(backend: str, device: torch.device) -> None:
    """-inf entries and whole rows of -inf in a bias that has a gradient."""
    case = Case(
        seed=3,
        variant=Variant(bias="pair", bias_grad=True, bias_float=True),
        lead=(2,),
        heads_k=2,
        seq_q=17,
        seq_k=40,
        bias_shape=(1, 2, 17, 40),
        bias_holes=True,
    )
    turned = replace(case, bias_view="transposed", bias_shape=(17, 40))
    parts = judged(backend, device, case), judged(backend, device, turned, dtypes=("bfloat16",))
    each_served(itertools.chain(*parts))


@trap()
def single_query_and_single_key(backend: str, device: torch.device) -> None:
    parts = []
    for i, (seq_q, seq_k) in enumerate(((1, 1), (1, 70), (70, 1))):
        case = Case(seed=4, lead=(3,), heads_k=2, group=2, seq_q=seq_q, seq_k=seq_k)
        causal = replace(case, variant=Variant(window=True), causal=True, align="lower_right")
        parts += judged(backend, device, case, dtypes=(DTYPES[i % 2],))
        parts += judged(backend, device, causal, dtypes=(DTYPES[1 - i % 2],))
    each_served(parts)


def _odd_strides(layout: str, dtypes: Sequence[str]) -> None:
    def run(backend: str, device: torch.device) -> None:
        case = Case(seed=5, layout=layout, lead=(2,), heads_k=2, seq_q=18, seq_k=21)
        dims = Variant(head_dim=24, head_dim_v=40), Variant(head_dim=7, head_dim_v=5)
        parts = (
            judged(backend, device, replace(case, variant=variant), dtypes=(dtype,))
            for variant, dtype in zip(dims, dtypes, strict=True)
        )
        each_served(itertools.chain.from_iterable(parts))

    TRAPS[f"odd_strides_{layout}"] = Trap(f"odd_strides_{layout}", run)


# Rows off 16-byte alignment, padded rows, joint projections, stride-0 batches; NaN between them.
for _layout, _dtypes in (
    ("shifted", ("bfloat16", "float16")),
    ("strided", ("float16", "bfloat16")),
    ("packed", ("bfloat16", "float32")),
    ("bshd", ("float32", "float16")),
    ("expanded", ("float16", "float16")),
):
    _odd_strides(_layout, _dtypes)


@trap()
def negated_when_read(backend: str, device: torch.device) -> None:
    """Tensors whose memory holds their negative, as the imaginary part of a conjugate does."""
    case = Case(seed=8, lead=(2,), heads_k=2, seq_q=9, seq_k=12)
    packed = Case(seed=8, variant=Variant(varlen=True), rank=3, lead=(), lens_q=(4, 3), lens_k=(5, 2))
    one_each = zip((case, case, packed, case), ("q", "k", "v", "dout"), DTYPES * 2, strict=False)
    parts = (judged(backend, device, replace(c, negated=n), dtypes=(t,)) for c, n, t in one_each)
    each_served(itertools.chain.from_iterable(parts))


@trap()
def other_tensors_of_a_known_signature(backend: str, device: torch.device) -> None:
    """The values kept for a call serve the next one of its kind, with other values at other addresses: results and
    gradients are those of the second."""

    def twice(case: Case) -> None:
        evaluate(make_inputs(case, device), backend)
        inputs = make_inputs(replace(case, seed=case.seed + 1), device)
        Judge(inputs, backend not in PLAIN).require(evaluate(inputs, backend))

    case = Case(seed=20, layout="bshd", lead=(2,), heads_k=2, seq_q=20, seq_k=24)
    biased = replace(
        case,
        variant=Variant(bias="pair", bias_grad=True, mask=True),
        bias_shape=(1, 2, 20, 24),
        mask_shape=(2, 1, 1, 24),
    )
    packed = replace(case, variant=Variant(varlen=True), rank=3, lead=(), lens_q=(9, 5), lens_k=(4, 8))
    each_served(
        functools.partial(twice, replace(c, variant=replace(c.variant, dtype=dtype)))
        for c, dtype in itertools.product((case, biased, packed), DTYPES)
    )


@trap()
def empty_sequences(backend: str, device: torch.device) -> None:
    """Sq = 0, Sk = 0, packed sequences of length 0, no sequence at all."""
    packed = Case(seed=6, variant=Variant(varlen=True, lse_grad=True), rank=3, lead=(), heads_k=2)
    require(
        backend,
        device,
        Case(seed=6, lead=(2,), seq_q=0),
        Case(seed=6, lead=(2,), seq_k=0),
        Case(seed=6, lead=(0,)),
        replace(packed, lens_q=(0, 5, 0), lens_k=(7, 0, 0)),
        replace(packed, lens_q=(0,), lens_k=(0,)),
        replace(packed, lens_q=(3, 0), lens_k=(4, 5)),
    )


@trap()
def nan_stays_in_its_packed_sequence(backend: str, device: torch.device) -> None:
    stays_in_its_sequence(backend, device, Case(seed=7, variant=Variant(varlen=True)), DTYPES)


def stays_in_its_sequence(backend: str, device: torch.device, case: Case, dtypes: Sequence[str]) -> None:
    """NaN in the second of four packed sequences changes no bit of the others, in each of these dtypes."""
    lens = (9, 30, 0, 17)
    case = replace(case, rank=3, lead=(), heads_k=2, lens_q=lens, lens_k=lens)

    def poisoned(dtype: str) -> None:
        inputs = make_inputs(replace(case, variant=replace(case.variant, dtype=dtype)), device)
        clean = evaluate(inputs, backend)
        with torch.no_grad():
            for x in (inputs.q, inputs.k, inputs.v, inputs.dout, *inputs.tangents.values()):
                assert x is not None
                x[9:39] = torch.nan
        dirty = evaluate(inputs, backend)
        for name, x in clean.items():
            y = dirty[name]
            if name in ("lse", "tlse"):
                x, y = x.t(), y.t()
            for part in (slice(0, 9), slice(39, None)):
                assert torch.equal(x[part], y[part]), f"{name}, {dtype}: NaN of one sequence reached another"

    each_served(functools.partial(poisoned, dtype) for dtype in dtypes)


@trap(slow=True)
def seventy_thousand_batch_heads(backend: str, device: torch.device) -> None:
    """B * H beyond the 65,535 that a grid's second dim can hold."""
    case = Case(
        seed=8,
        variant=Variant(head_dim=8, head_dim_v=8, bias="key", bias_grad=True),
        lead=(17500,),
        heads_k=4,
        seq_q=3,
        seq_k=5,
        bias_shape=(17500, 1, 1, 5),
    )
    plain = replace(case, variant=Variant(head_dim=8, head_dim_v=8), bias_shape=None)
    require(backend, device, plain, case)


@trap(slow=True, one_of=HALVES)
def seventy_thousand_packed_sequences(backend: str, device: torch.device, dtype: str) -> None:
    inputs = make_inputs(
        Case(
            seed=9,
            variant=Variant(dtype=dtype, head_dim=16, varlen=True),
            rank=3,
            lead=(),
            heads_k=1,
            lens_q=(1, 2) * 35000,
            lens_k=(1, 2) * 35000,
        ),
        device,
    )
    found = evaluate(inputs, backend)
    # Sequences of one row: out is v, and softmax has no slope.
    first = slice(0, None, 3)
    assert torch.equal(found["out"][first], inputs.v[first])
    assert inputs.dout is not None
    assert torch.equal(found["dv"][first], inputs.dout[first])
    q, k, v = (x.double() for x in (inputs.q, inputs.k, inputs.v))
    p = torch.softmax(torch.stack([(q[1::3] * k[i::3]).sum(-1) for i in (1, 2)]) / 4, 0)
    _close(found["out"][1::3], p[0, ..., None] * v[1::3] + p[1, ..., None] * v[2::3], "out")


@trap(cuda=True, gigabytes=70, slow=True, one_of=HALVES)
def more_than_two_billion_elements(backend: str, device: torch.device, dtype: str) -> None:
    """Offsets beyond 2^31: a large batch, forward and backward."""
    batch, seq, dim = 530_000, 64, 64
    assert batch * seq * dim > 2**31
    q, k, v, dout = (_randn(batch, 1, seq, dim, device=device, dtype=dtype) for _ in range(4))
    found = evaluate(Inputs(q, k, v, dout=dout), backend)
    ends = torch.tensor([0, 1, batch // 2, batch - 2, batch - 1], device=device)
    Judge(Inputs(q[ends], k[ends], v[ends], dout=dout[ends])).require({name: x[ends] for name, x in found.items()})


@trap(cuda=True, gigabytes=40, slow=True, one_of=HALVES)
def bias_of_more_than_two_billion_elements(backend: str, device: torch.device, dtype: str) -> None:
    seq, dim = 46_400, 16
    assert seq * seq > 2**31
    q, k, v, dout = (_randn(1, 1, seq, dim, device=device, dtype=dtype) for _ in range(4))
    bias = _randn(1, 1, seq, seq, device=device, dtype=dtype)
    found = evaluate(Inputs(q, k, v, bias=bias, dout=dout), backend)
    rows = slice(seq - 32, None)
    part = Inputs(q[:, :, rows], k, v, bias=bias[:, :, rows], dout=dout[:, :, rows])
    results = {n: found[n][:, :, rows] for n in ("out", "lse", "dq", "dbias")}
    Judge(part).require(results)


@trap(cuda=True, gigabytes=20, slow=True, one_of=HALVES)
def strides_of_more_than_two_billion_elements(backend: str, device: torch.device, dtype: str) -> None:
    """Two batches 2^31 elements apart, and rows far apart, in one NaN-filled buffer."""
    buffer = torch.full((2**31 + 2**20,), torch.nan, device=device, dtype=getattr(torch, dtype))
    for strides in ((2**31, 2**14, 64, 1), (2**15, 2**14, (2**31 - 2**16) // 70, 1)):
        x = buffer.as_strided((2, 2, 70, 64), strides)
        x.copy_(torch.randn(2, 2, 70, 64, device=device))
        dout = _randn(2, 2, 70, 64, device=device, dtype=dtype)
        for inputs in (Inputs(x, dout, dout, dout=dout), Inputs(dout, x, x, dout=x)):
            Judge(inputs).require(evaluate(inputs, backend))
        buffer.fill_(torch.nan)


@trap(cuda=True, gigabytes=40, slow=True)
def long_sequence(backend: str, device: torch.device) -> None:
    """Some thousand keys: many tiles, sums of many terms."""
    variant = Variant(head_dim=64, head_dim_v=64, window=True)
    case = Case(seed=10, variant=variant, lead=(1,), seq_q=4160, seq_k=4160, causal=True)
    require(backend, device, case, dtypes=HALVES)


@trap(cuda=True, one_of=HALVES)
def garbage_offsets(backend: str, device: torch.device, dtype: str) -> None:
    """Unchecked offsets that fall, are negative or end far outside: no access out of bounds."""
    variant = Variant(dtype=dtype, head_dim=64, head_dim_v=64, varlen=True)
    case = Case(
        seed=15,
        variant=variant,
        rank=3,
        lead=(),
        heads_k=2,
        lens_q=(100, 30, 70),
        lens_k=(100, 30, 70),
    )
    inputs = make_inputs(case, device)
    for known in (True, False):
        options = inputs.options if known else dict(inputs.options, max_seqlen_q=None, max_seqlen_k=None)
        for values in (
            (0, 150, 20, 200),
            (0, -7, 2**30, 2**31 - 1),
            (2**30, 0, 5, 200),
            (-(2**31), 50, 60, -1),
        ):
            offsets = torch.tensor(values, dtype=torch.int32, device=device)
            wild = replace(inputs, cu_seqlens_q=offsets, cu_seqlens_k=None, options=options)
            evaluate(wild, backend)
            evaluate(replace(wild, cu_seqlens_q=inputs.cu_seqlens_q, cu_seqlens_k=offsets), backend)
            torch.cuda.synchronize(device)
    Judge(inputs).require(evaluate(inputs, backend))
