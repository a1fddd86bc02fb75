"""The tensors of every kind of call, each declared once: its role, its dtypes, its derivatives, and whether a call may
leave it out.

A kind of call is a NamedTuple whose annotations are the declaration. :class:`Dense` and :class:`Packed` stand here, as
users give them; the tuples that kernels take stand beside their ops, with the same annotations: ``Tensors`` (ops.py),
``PagedTensors``, ``FP8Tensors`` and ``ResidualCall``. :func:`fields` reads them. From the fields follow the schemas of
raw ops (schemas.py), the rules of derivatives (derivatives.py), batching under vmap, ranks, copies and checks (ops.py,
plans.py, triton/checks.py), the features by which backends are chosen, and the refusal of tensors that a backend does
not read (choice/backends.py).
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

#: The kinds of call that have kernels of their own; ATTENTION stands for dense and packed calls.
ATTENTION, PAGED, FP8, RESIDUAL, LAPLACIAN = "attention", "paged", "fp8", "residual", "laplacian"


class Role(Enum):
    """The place of a tensor in the formula, from which its dims follow."""

    ROWS = "rows of numbers [*, H, S, D], which kernels read along the last dim with stride 1"
    STATISTICS = "a number for each row of q [*, Hq, Sq], which kernels read as one block"
    SCORES = "broadcasts to the scores [*, Hq, Sq, Sk]"
    TILES = "a table of tiles for each block of a mask [*, H or 1, 1, N]"
    KEYS = "broadcasts to the rows of k [*, Hk, Sk]"
    HEADS = "broadcasts to the heads of q [*, Hq]"
    LOGITS = "a number for each head of q [Hq]"
    INDEX = "integers, which kernels read as one block"
    SCALE = "factors of 8-bit floats, with any strides"
    CACHE = "the pages of keys or values of all sequences"


#: Roles of tensors with leading dims, which torch.vmap may map without a loop over samples.
BATCHED = frozenset((Role.ROWS, Role.STATISTICS, Role.SCORES, Role.TILES, Role.KEYS))


class DerivativeRule(NamedTuple):
    """The derivatives that one tensor argument has."""

    reverse: bool = False
    """A gradient."""
    forward: bool = False
    """A tangent."""
    second: bool = False
    """Second derivatives."""
    mapped: bool = False
    """A batching rule under ``torch.vmap``."""
    lacking: Mapping[str, str] = {}
    """Backends that have no derivative by this argument although others do, each with its reason. The choice reads
    it."""


EVERY = DerivativeRule(True, True, True, True)
PLACES = DerivativeRule(mapped=True)  # bools, integers and seeds: constants to any derivative
FIXED = DerivativeRule()


class Argument(NamedTuple):
    """The declaration of a tensor, as an annotation carries it."""

    role: Role
    rule: DerivativeRule
    dtypes: tuple[torch.dtype | None, ...] = (None,)  # None: that of q
    widened: bool = False  # 16-bit numbers are taken with a wider q, too, and cast

    def taken(self, q: torch.dtype) -> tuple[torch.dtype, ...]:
        """The dtypes that kernels take beside a q of this dtype."""
        return tuple([q if dtype is None else dtype for dtype in self.dtypes])


@dataclass(frozen=True)
class Field:
    """One field of a kind of call: a tensor, or an option of a raw op."""

    name: str
    type: Any  # Tensor, or the type of an option
    optional: bool
    argument: Argument | None  # None: an option

    @property
    def role(self) -> Role | None:
        return None if self.argument is None else self.argument.role


@functools.cache
def fields(declaration: type) -> dict[str, Field]:
    """The fields of a NamedTuple by name, in order."""
    hints = typing.get_type_hints(declaration, include_extras=True)
    found = {}
    for name in declaration._fields:  # type: ignore[attr-defined]
        hint, argument = hints[name], None
        if typing.get_origin(hint) is Annotated:
            hint, argument = typing.get_args(hint)
        optional = isinstance(hint, UnionType)
        if optional:
            (hint,) = (x for x in typing.get_args(hint) if x is not type(None))
        found[name] = Field(name, hint, optional, argument)
    return found


def rules(*declarations: type) -> dict[str, DerivativeRule]:
    """The derivatives of the tensors of these tuples, by name."""
    every = (field for declaration in declarations for field in fields(declaration).values())
    return {field.name: field.argument.rule for field in every if field.argument is not None}


def named(declaration: type, *roles: Role) -> tuple[str, ...]:
    """The names of the tensors with one of these roles."""
    return tuple(name for name, field in fields(declaration).items() if field.role in roles)


_FP32, _INT32, _INT64 = torch.float32, torch.int32, torch.int64
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NO_LOG = "SDPA takes key_weight as its logarithm, whose derivative at zero is lost"
_NO_SLOPES = dict.fromkeys(
    ("triton", "cuda"),
    "ALiBi slopes have no derivative in these kernels but the gradient of an eager call without sink and pair_gate; "
    "detach them, or write learnt ones as a bias",
)

OFFSETS = Argument(Role.INDEX, PLACES, (_INT32,))
SCALE = Argument(Role.SCALE, FIXED, (_FP32,))

# The tensors of calls with derivatives, and of the ops beneath them.
Rows = Annotated[Tensor, Argument(Role.ROWS, EVERY)]
OptionalRows = Annotated[Tensor | None, Argument(Role.ROWS, EVERY)]
Statistics = Annotated[Tensor, Argument(Role.STATISTICS, EVERY, (_FP32,))]
Bias = Annotated[Tensor | None, Argument(Role.SCORES, EVERY, (None, _FP32), widened=True)]
KeyWeight = Annotated[Tensor | None, Argument(Role.KEYS, EVERY._replace(lacking={"sdpa": _NO_LOG}), (None, _FP32))]
Mask = Annotated[Tensor | None, Argument(Role.SCORES, PLACES, (torch.bool,))]
MaskTiles = Annotated[Tensor | None, Argument(Role.TILES, PLACES, (_INT32,))]
Slopes = Annotated[Tensor | None, Argument(Role.HEADS, EVERY._replace(lacking=_NO_SLOPES), (_FP32,))]
Sink = Annotated[Tensor | None, Argument(Role.LOGITS, EVERY, (None, _FP32))]
PairGate = Annotated[Tensor | None, Argument(Role.SCORES, EVERY, (None, _FP32))]
Gate = Annotated[Tensor, Argument(Role.SCORES, EVERY, (None, _FP32))]
Seed = Annotated[Tensor | None, Argument(Role.INDEX, PLACES, (_INT64,))]
Offsets = Annotated[Tensor, OFFSETS]
OptionalOffsets = Annotated[Tensor | None, OFFSETS]
PairOffsets = Annotated[Tensor | None, Argument(Role.INDEX, PLACES, (_INT64,))]

# The tensors of calls without derivatives: paged ones, and those of 8-bit floats.
FixedRows = Annotated[Tensor, Argument(Role.ROWS, FIXED)]
FixedSink = Annotated[Tensor | None, Argument(Role.LOGITS, FIXED, (None, _FP32))]
Cache = Annotated[Tensor, Argument(Role.CACHE, FIXED, (None, *_FP8))]
Table = Annotated[Tensor, Argument(Role.INDEX, FIXED, (_INT32,))]
OptionalTable = Annotated[Tensor | None, Argument(Role.INDEX, FIXED, (_INT32,))]
Scale = Annotated[Tensor | None, SCALE]


class Dense(NamedTuple):
    """The tensors of a dense call, as users give them."""

    q: Rows
    k: Rows
    v: Rows
    bias: Bias = None
    key_weight: KeyWeight = None
    mask: Mask = None
    alibi_slopes: Slopes = None
    sink: Sink = None
    pair_gate: PairGate = None


class Packed(NamedTuple):
    """The tensors of a packed call, as users give them."""

    q: Rows
    k: Rows
    v: Rows
    cu_seqlens_q: Offsets
    cu_seqlens_k: OptionalOffsets = None
    bias: Bias = None
    key_weight: KeyWeight = None
    alibi_slopes: Slopes = None
    sink: Sink = None


class Seeded(NamedTuple):
    """The seed of a call with dropout."""

    dropout_seed: Seed = None


class Scales(NamedTuple):
    """The scales of a call on 8-bit floats."""

    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None
