"""The parts that the raw ops of every backend share: arguments, grouped and flat, output layouts, fake kernels, and
batching under vmap.

The ops themselves are defined next to their kernels: ``flashsci::cuda_*`` in C++ (csrc/bindings),
``flashsci::triton_*`` in flashsci/backends/triton. They are functional, and know nothing of autograd:
flashsci/call/autograd.py adds it. Python passes :class:`Tensors`, :class:`Scalars`, :class:`Saved` and :class:`Tangents`;
schemas are flat, and only :data:`PASSES` converts one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashsci.call import kinds, op_checks
from flashsci.call.kinds import Role
from flashsci.call.older_vmap import by_rule
from flashsci.call.schemas import LIBRARY, arguments, define_op
from flashsci.call.torch_state import holds, is_traced


def with_inner_keys(bias: Tensor) -> Tensor:
    """A copy whose keys are neighbours, with the layout of :func:`empty_with_inner_keys`.

    It is contiguous where the call is recorded, because the length may differ in the next call.
    """
    if torch.compiler.is_compiling() or is_traced():
        return bias.contiguous()
    return empty_with_inner_keys(bias).copy_(bias)


def empty_with_inner_keys(bias: Tensor) -> Tensor:
    """An empty tensor for such a copy; rows begin at multiples of 16 bytes, which Hopper's copies need."""
    rest = -bias.shape[-1] % (16 // bias.element_size())
    rows = bias.new_empty(*bias.shape[:-1], bias.shape[-1] + rest)
    return rows[..., : bias.shape[-1]] if rest else rows


class Tensors(NamedTuple):
    """The tensors of one call, as kernels take them (docs/develop/extending.md has shapes and strides). The first
    five have gradients."""

    q: kinds.Rows
    k: kinds.Rows
    v: kinds.Rows
    bias: kinds.Bias = None
    key_weight: kinds.KeyWeight = None
    mask: kinds.Mask = None
    cu_seqlens_q: kinds.OptionalOffsets = None
    cu_seqlens_k: kinds.OptionalOffsets = None
    bias_offsets: kinds.PairOffsets = None
    dropout_seed: kinds.Seed = None
    alibi_slopes: kinds.Slopes = None  # fp32 [*, Hq], packed [N or 1, Hq]
    mask_tiles: kinds.MaskTiles = None  # of the mask (mask_tiles.py); only triton's kernels read it

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that have gradients in kernels, in the order of :class:`Tangents`."""
        return self[: len(Tangents._fields)]

    def with_leaves(self, leaves: Sequence[Any]) -> Tensors:
        """The call with other tensors in the place of :attr:`leaves`."""
        return self._replace(**dict(zip(Tangents._fields, leaves, strict=True)))

    def has_strided_bias(self) -> bool:
        """Whether the bias is worth a copy: its keys are not neighbours in memory, and no dim is expanded.

        For example, it came out of a Linear over pairs. A copy of an expanded bias would hold every repetition.
        """
        bias = self.bias
        return (
            bias is not None
            and bias.dim() > 0
            and bias.stride(-1) != 1
            and bias.shape[-1] != 1
            and all(n == 1 or s != 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
        )

    def inner_contiguous(self, copied: Callable[[Tensor], Tensor] | None = with_inner_keys) -> Tensors:
        """The tensors, with copies of q, k, v if their last dim is not contiguous, as kernels need it, and of a
        strided bias.

        ``copied`` makes the copy of the bias; None: no copy. Kernels take such a bias, but read it number by number,
        and again for every head and batch member that shares it.
        """
        bias = self.bias
        if copied is not None and bias is not None and self.has_strided_bias():
            bias = copied(bias)
        elif self.q.stride(-1) == self.k.stride(-1) == self.v.stride(-1) == 1:
            return self
        return self._replace(q=op_checks.rows(self.q), k=op_checks.rows(self.k), v=op_checks.rows(self.v), bias=bias)

    def laid_out(self) -> Tensors:
        """The tensors, with copies of q, k, v, offsets and seed that are not stored as kernels read them.

        Tensors from saved-tensor hooks may have any strides.
        """
        rows = self.inner_contiguous(None)
        tiles = rows.mask_tiles
        if tiles is not None and tiles.stride(-1) != 1:
            rows = rows._replace(mask_tiles=tiles.contiguous())
        indices = [rows[i] for i in _INDICES]
        if all(x is None or x.is_contiguous() for x in indices):
            return rows
        every = list(rows)
        for i, x in zip(_INDICES, indices, strict=True):
            every[i] = None if x is None else x.contiguous()
        return Tensors._make(every)


#: The arguments of a prepared function: the fields of :class:`Tensors` in their order, in any sequence.
Given = Sequence[Any]
_ROWS = tuple(Tensors._fields.index(name) for name in kinds.named(Tensors, Role.ROWS))
_INDICES = tuple(Tensors._fields.index(name) for name in kinds.named(Tensors, Role.INDEX))
# The tensors that broadcast to scores or to rows of k, each with the number of dims that it has fewer than q.
_FEWER_DIMS = tuple(
    (i, int(field.role is Role.KEYS))
    for i, field in enumerate(kinds.fields(Tensors).values())
    if field.role in (Role.SCORES, Role.TILES, Role.KEYS)
)


def raised(tensors: Given, rank: int) -> Tensors:
    """The tensors, those that broadcast at the rank of q: views, which a compiler may see."""
    every = list(tensors)
    for i, fewer in _FEWER_DIMS:
        every[i] = with_rank(every[i], rank - fewer)
    return Tensors._make(every)


def with_rank(x: Tensor | None, rank: int) -> Tensor | None:
    """The tensor with dims of size 1 in front, up to ``rank``: a view at the same address."""
    return x if x is None else x[(None,) * (rank - x.dim())]


def interleaved(x: Tensor, times: int, dim: int) -> Tensor:
    """``x.repeat_interleave(times, dim)`` for a negative dim. torch.jit.trace records that function on the CPU alone."""
    shape = list(x.shape)
    shape.insert(len(shape) + dim + 1, times)
    return x.unsqueeze(dim).expand(shape).flatten(dim - 1, dim)


def packed(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, alibi_slopes: Any) -> Given:
    """Packed tensors as users give them, [T, H, D], in the order of :class:`Tensors` as kernels take them."""
    rows = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    return *rows, None, None, None, cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes, None


#: In the place of the longest queries: unknown, and no bit of a sequence's results may depend on the others of the call.
BATCH_INVARIANT = -2


class Scalars(NamedTuple):
    """The options of one call, as kernels take them: 0 is off (softcap, dropout), -1 is none (windows) or unknown
    (longest lengths; :data:`BATCH_INVARIANT` is another unknown)."""

    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    softcap: float
    window_left: int
    window_right: int
    lower_right: bool
    dropout_p: float
    precision: str
    deterministic: bool
    caps_bias: bool = False  # the softcap bounds bias and ALiBi, too

    def batch_invariant(self) -> bool:
        """Whether no bit of a sequence's results may depend on the others of the call."""
        return self.max_seqlen_q == BATCH_INVARIANT

    def windowed(self) -> bool:
        """Whether a window hides scores."""
        return self.window_left >= 0 or self.window_right >= 0


class Saved(NamedTuple):
    """The values that a forward leaves for derivatives. ``out`` and ``lse`` are detached."""

    tensors: Tensors
    out: kinds.Rows
    lse: kinds.Statistics
    scalars: Scalars

    def flat(self) -> tuple[Any, ...]:
        return *self.tensors, self.out, self.lse, *self.scalars

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Saved:
        """The inverse of :meth:`flat`."""
        return cls(Tensors(*flat[:_T]), flat[_T], flat[_T + 1], Scalars(*flat[_T + 2 :]))


class Tangents(NamedTuple):
    """One tangent for each of the tensors that have gradients in kernels, the first of :class:`Tensors`; None for zero."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    key_weight: Tensor | None


_TENSOR_ARGS, _SCALAR_ARGS = arguments(Tensors), arguments(Scalars)
# Tangents of the tensors that have gradients; in the double backward, cotangents of their gradients.
_TANGENT_ARGS = arguments(Tangents, prefix="t")
_SAVED_ARGS = f"{_TENSOR_ARGS}, Tensor out, Tensor lse, {_SCALAR_ARGS}"
_GRADIENTS = ", ".join(f"Tensor {{0}}{name}" for name in Tangents._fields)
FORWARD_SCHEMA = f"({_TENSOR_ARGS}, {_SCALAR_ARGS}) -> (Tensor out, Tensor lse)"
BACKWARD_SCHEMA = f"(Tensor? dout, Tensor? dlse, {_SAVED_ARGS}, int need) -> ({_GRADIENTS.format('d')})"
JVP_SCHEMA = f"({_TANGENT_ARGS}, {_SAVED_ARGS}) -> (Tensor tout, Tensor tlse)"
# Tangents along a first and a second direction, and of the former along the latter.
_DIRECTIONS = ("t", "u", "tu")
_SECOND_TANGENT_ARGS = ", ".join(arguments(Tangents, prefix=p) for p in _DIRECTIONS)
SECOND_JVP_SCHEMA = f"({_SECOND_TANGENT_ARGS}, Tensor tlse, Tensor ulse, {_SAVED_ARGS}) -> (Tensor tuout, Tensor tulse)"
DOUBLE_BACKWARD_SCHEMA = (
    f"({_TANGENT_ARGS}, Tensor? dout, Tensor? dlse, {_SAVED_ARGS}, int need) -> "
    f"({_GRADIENTS.format('g')}, Tensor gdout, Tensor gdlse)"
)

# The gradients wanted: a bit for each field of Tangents in order, and in the double backward for dout and dlse.
NEED_Q, NEED_K, NEED_V, NEED_BIAS, NEED_KEY_WEIGHT, NEED_DOUT, NEED_DLSE = 1, 2, 4, 8, 16, 32, 64


def _memory_order(x: Tensor) -> list[int]:
    """All dims except the last, in order of falling stride; equal strides keep their order."""
    stride = x.stride()
    order: list[int] = []
    for dim in range(x.dim() - 1):  # only by comparisons: torch.compile cannot sort symbolic strides
        place = len(order)
        while place > 0 and holds(stride[order[place - 1]] < stride[dim]):
            place -= 1
        order.insert(place, dim)
    return order


def empty_like_layout(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised dense tensor of ``shape`` with its leading dims in the memory order of ``like``.

    The strides of ``like`` define that order. The last dim is innermost; equal strides keep their order. ``like`` and
    ``shape`` have the same number of dims.
    """
    rank = len(shape)
    order = _memory_order(like)
    if order == list(range(rank - 1)):
        return like.new_empty(shape, dtype=dtype)
    strides = [1] * rank
    step = shape[-1]
    for dim in reversed(order):
        strides[dim] = step
        size = shape[dim]
        step = step * (max(size, 1) if type(size) is int else torch.sym_max(size, 1))
    return like.new_empty_strided(shape, strides, dtype=dtype)


def is_like(made: Tensor | None, x: Tensor) -> bool:
    """Whether ``torch.empty_like(x)``, which is faster than a call with sizes and strides, gives a tensor like
    ``made``."""
    if made is None:
        return False
    found = torch.empty_like(x)
    return (found.shape, found.stride(), found.dtype) == (made.shape, made.stride(), made.dtype)


def follow_layout(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the memory layout of :func:`empty_like_layout`; differentiable, no copy if it already has it."""
    order = [*_memory_order(like), x.dim() - 1]
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fake_forward(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Shapes, strides and dtypes of every backend's forward."""
    q = tensors.q
    out = empty_like_layout(q, (*q.shape[:-1], tensors.v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=statistics_dtype(q.dtype))


def pitches_bias_gradient(bias: Tensor, q: Tensor, k: Tensor, windowed: bool) -> bool:
    """Whether a backward returns the gradient of a bias at a pitch of 16 bytes: as the bias, of 16 bits, has it, with a
    number for every score and no window. Tiles are written there as they are read."""
    keys = bias.shape[-1]
    return (
        not windowed
        and bias.element_size() == 2
        and bias.dim() > 1
        and bias.stride(-1) == 1
        and bias.stride(-2) > keys
        and bias.stride(-2) % 8 == 0
        and keys % 8 != 0
        and keys == k.shape[-2]
        and bias.shape[:-1] == q.shape[:-1]
        and 0 not in bias.shape
    )


def empty_bias_gradient(bias: Tensor, pitched: bool) -> Tensor:
    """An empty gradient of a bias: row-major, and ``pitched`` or not."""
    return empty_with_inner_keys(bias) if pitched else bias.new_empty(bias.shape)


def count_of(along: Sequence[Tensor | None]) -> int:
    """The number of directions of tangents or cotangents [n, *]."""
    return next(x.shape[0] for x in along if x is not None)


def stacked(x: Tensor, count: int) -> Tensor:
    """An empty tensor of ``count`` of these, one after the other, each with the strides of ``x``."""
    return x.new_empty_strided((count, *x.shape), (x.numel(), *x.stride()))


def fake_backward(tensors: Tensors, need: int, windowed: bool = True) -> tuple[Tensor, ...]:
    """Shapes, strides and dtypes of every backend's backward; a gradient that is not needed is
    empty."""
    gradients = []
    for i, x in enumerate(tensors.leaves):
        if x is None or not need & 1 << i:
            gradients.append((tensors.q if x is None else x).new_empty((0,)))
        elif i in _ROWS:
            gradients.append(empty_like_layout(x, x.shape))
        elif x is tensors.bias:
            hidden = windowed or tensors.cu_seqlens_q is not None
            pitched = pitches_bias_gradient(x, tensors.q, tensors.k, hidden)
            gradients.append(empty_bias_gradient(x, pitched))
        else:
            gradients.append(x.new_empty(x.shape))
    return tuple(gradients)


def fake_many_backward(count: int, tensors: Tensors, need: int) -> tuple[Tensor, ...]:
    """The same for gradients of many cotangents, [count, *]."""
    found = fake_backward(tensors, need)
    wanted = (x is not None and need & 1 << i for i, x in enumerate(tensors.leaves))
    return tuple(stacked(x, count) if needed else x for x, needed in zip(found, wanted, strict=True))


def fake_double_backward(tensors: Tensors, need: int) -> tuple[Tensor, ...]:
    """Shapes, strides and dtypes of the backward's results, then of the gradients of dout and dlse."""
    q, v = tensors.q, tensors.v
    gout = q.new_empty(0)
    if need & NEED_DOUT:
        gout = empty_like_layout(q, (*q.shape[:-1], v.shape[-1]))
    shape = q.shape[:-1] if need & NEED_DLSE else (0,)
    glse = q.new_empty(shape, dtype=statistics_dtype(q.dtype))
    return (*fake_backward(tensors, need), gout, glse)


def fake_many_double_backward(count: int, tensors: Tensors, need: int) -> tuple[Tensor, ...]:
    """The same for gradients along many directions, [count, *]."""
    found = zip(fake_double_backward(tensors, need)[-2:], (NEED_DOUT, NEED_DLSE), strict=True)
    return *fake_many_backward(count, tensors, need), *(stacked(x, count) if need & bit else x for x, bit in found)


_T, _L = len(Tensors._fields), len(Tangents._fields)


class Pass(NamedTuple):
    """One of the computations of a backend: the schema of its raw op, and the conversion of its arguments in
    both directions."""

    schema: str
    fake: Callable[..., Any]
    flat: Callable[..., tuple[Any, ...]]  # the arguments of a backend's function -> those of the op
    grouped: Callable[..., tuple[Any, ...]]  # and back
    directed: int = _L  # its first arguments, tangents or cotangents: results are linear in them
    along: int = 0  # the leading dims of these and of results that the call has not: directions


PASSES = {
    "forward": Pass(
        FORWARD_SCHEMA,
        lambda tensors, scalars: fake_forward(tensors),
        lambda tensors, scalars: (*tensors, *scalars),
        lambda *flat: (Tensors(*flat[:_T]), Scalars(*flat[_T:])),
    ),
    "backward": Pass(
        BACKWARD_SCHEMA,
        lambda dout, dlse, saved, need: fake_backward(saved.tensors, need, saved.scalars.windowed()),
        lambda dout, dlse, saved, need: (
            dout, dlse, *saved.flat(), need,
        ),
        lambda dout, dlse, *flat: (dout, dlse, Saved.of(flat[:-1]), flat[-1]),
        directed=2,
    ),
    "many_backward": Pass(
        BACKWARD_SCHEMA,
        lambda dout, dlse, saved, need: fake_many_backward(count_of((dout, dlse)), saved.tensors, need),
        lambda dout, dlse, saved, need: (dout, dlse, *saved.flat(), need),
        lambda dout, dlse, *flat: (dout, dlse, Saved.of(flat[:-1]), flat[-1]),
        directed=2,
        along=1,
    ),
    "jvp": Pass(
        JVP_SCHEMA,
        lambda tangents, saved: fake_forward(saved.tensors),
        lambda tangents, saved: (
            *tangents, *saved.flat(),
        ),
        lambda *flat: (Tangents(*flat[:_L]), Saved.of(flat[_L:])),
    ),
    "many_jvp": Pass(
        JVP_SCHEMA,
        lambda tangents, saved: tuple(stacked(x, count_of(tangents)) for x in fake_forward(saved.tensors)),
        lambda tangents, saved: (*tangents, *saved.flat()),
        lambda *flat: (Tangents(*flat[:_L]), Saved.of(flat[_L:])),
        along=1,
    ),
    "second_jvp": Pass(
        SECOND_JVP_SCHEMA,
        lambda first, second, mixed, first_lse, second_lse, saved: fake_forward(saved.tensors),
        lambda first, second, mixed, first_lse, second_lse, saved: (
            *first, *second, *mixed, first_lse, second_lse, *saved.flat(),
        ),
        lambda *flat: (
            *(Tangents(*flat[n * _L : (n + 1) * _L]) for n in range(3)), *flat[3 * _L : 3 * _L + 2], Saved.of(flat[3 * _L + 2 :]),
        ),
    ),
    "double_backward": Pass(
        DOUBLE_BACKWARD_SCHEMA,
        lambda tangents, dout, dlse, saved, need: fake_double_backward(saved.tensors, need),
        lambda tangents, dout, dlse, saved, need: (
            *tangents, dout, dlse, *saved.flat(), need,
        ),
        lambda *flat: (
            Tangents(*flat[:_L]), flat[_L], flat[_L + 1], Saved.of(flat[_L + 2 : -1]), flat[-1],
        ),
    ),
    "many_double_backward": Pass(
        DOUBLE_BACKWARD_SCHEMA,
        lambda tangents, dout, dlse, saved, need: fake_many_double_backward(count_of(tangents), saved.tensors, need),
        lambda tangents, dout, dlse, saved, need: (*tangents, dout, dlse, *saved.flat(), need),
        lambda *flat: (Tangents(*flat[:_L]), flat[_L], flat[_L + 1], Saved.of(flat[_L + 2 : -1]), flat[-1]),
        along=1,
    ),
}  # fmt: skip


def define(backend: str, what: str, kernel: Callable[..., Any], keys: Sequence[str]) -> Callable[..., Any]:
    """Define ``flashsci::<backend>_<what>`` from Python, with one kernel for the given dispatch keys, a fake kernel
    and a rule for vmap.

    Args:
        what: a key of :data:`PASSES`.
        kernel: takes the grouped arguments of that pass.

    Returns:
        A function that calls the op with grouped arguments, as a backend's module offers it.
    """
    schema, fake, flat, grouped, directed, along = PASSES[what]
    op = define_op(
        f"{backend}_{what}",
        schema,
        lambda *given: kernel(*grouped(*given)),
        keys,
        lambda *given: fake(*grouped(*given)),
    )
    rule = register_vmap(op, directed=directed, along=along)
    if what == "jvp":  # as functional.jacobian(strategy="forward-mode", vectorize=True) calls it
        LIBRARY.impl(f"{backend}_{what}", by_rule(op, rule), "Batched")

    def call(*arguments: Any) -> Any:
        given = flat(*arguments)
        # torch's way to the same function costs a fifth of a small call's host time.
        if bypasses_dispatcher(given):
            return kernel(*arguments)
        return op(*given)

    return call


_escaped = torch._C._functorch.is_functorch_wrapped_tensor
_transforms = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_profiled = torch.autograd._profiler_enabled

is_legacy_batch = torch._C._functorch.is_legacy_batchedtensor
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OPTIONS = frozenset((NoneType, bool, int, float, str))


def unobserved() -> bool:
    """Whether nothing observes the ops of a call: no compiler, functorch transform, mode or profiler.

    torch.jit.trace is left to :func:`bypasses_dispatcher` and to the comparison of repeated calls, which sees its dispatch key.
    """
    return not (is_compiling() or _transforms() or _modes() or _profiled())


def bypasses_dispatcher(given: Sequence[Any]) -> bool:
    """Whether a call may bypass torch's dispatcher: it is :func:`unseen`, nothing traces it, and its arguments are
    ordinary tensors.

    None of them is a subclass, a symbol, a tensor that escaped from a functorch transform, a batch of the vmap behind
    ``is_grads_batched``, or a tensor without memory (of device "meta"); and none has memory that holds its negative
    (the imaginary part of a conjugate) or, for a tensor of zeros, nothing.
    """
    if not unobserved() or is_traced():
        return False
    for x in given:
        kind = type(x)
        if kind in _TENSORS:
            if x.is_neg() or x._is_zerotensor() or _escaped(x) or is_legacy_batch(x) or x.is_meta:
                return False
        elif kind not in _OPTIONS:
            return False
    return True


def _roles() -> dict[str, Role | None]:
    """The roles of all arguments of the raw ops by name. A tangent, a gradient and a cotangent have that of their tensor."""
    tensors = {name: field.role for name, field in kinds.fields(Tensors).items()}
    results = {name: field.role for name, field in kinds.fields(Saved).items() if field.argument is not None}
    return {
        **tensors,
        **{f"{prefix}{name}": tensors[name] for prefix in _DIRECTIONS for name in Tangents._fields},
        **{f"{prefix}lse": results["lse"] for prefix in _DIRECTIONS[:2]},
        **results,
        **{f"d{name}": role for name, role in results.items()},
    }


#: The roles of the arguments of these ops.
ROLES = _roles()


#: Functions for calls of which tangents or cotangents alone are mapped, by the name of the op: from the number of directions, the mapped
#: dims and the arguments to the results and their mapped dims; None: the call is not served. directions.py adds them.
MANY: dict[str, Callable[..., tuple[Any, Any] | None]] = {}


def register_vmap(
    op: Any, roles: Mapping[str, Role | None] = ROLES, directed: int = _L, along: int = 0
) -> Callable[..., tuple[Any, Any]]:
    """Teach ``op`` to run under vmap: the mapped dim becomes one more leading (batch) dim.

    ``roles``: those of its arguments by name. ``directed``, ``along``: as in :class:`Pass`.

    A function of :data:`MANY` comes first. Returns the rule.

    Samples run one after the other where one batch would give something else: where q has no leading dim left (two
    nested vmaps of ``[B, H, S, D]``), in packed calls, whose tensors have no leading dims, under dropout, whose
    entries depend on the index in the batch, and where another argument (offsets, a seed) is mapped.
    """
    names = [argument.name for argument in op._schema.arguments]
    name = op._schema.name.removeprefix("flashsci::")
    tensors = tuple(p for p, name in enumerate(names) if roles.get(name) in kinds.BATCHED)
    packed = names.index("cu_seqlens_q")
    dropout = names.index("dropout_p") if "dropout_p" in names else None

    def laid_out(x: Tensor, position: int) -> Tensor:
        """``x`` as the op takes it: vmap may leave any dim innermost, or expand."""
        role = roles[names[position]]
        if role is Role.STATISTICS:
            return x.contiguous()
        return op_checks.rows(x) if role is Role.ROWS else x

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        mapped = [p for p, dim in enumerate(in_dims) if dim is not None]
        if name in MANY and max(mapped) < directed:
            found = MANY[name](info.batch_size, in_dims, *args)
            if found is not None:
                return found
        alone = (
            args[packed] is not None
            or (dropout is not None and any(args[dropout : dropout + 1]))  # a default may be left out
            or any(p not in tensors for p in mapped)
        )
        places = {p: along if p < directed else 0 for p in (*tensors, *mapped)}  # of the mapped dim
        samples = {
            p: args[p].unsqueeze(at).expand(*args[p].shape[:at], info.batch_size, *args[p].shape[at:])
            if in_dims[p] is None  # expanded too: its gradient is wanted per sample
            else args[p].movedim(in_dims[p], at)
            for p, at in places.items()
            if args[p] is not None
        }

        def call(of: Callable[[Tensor, int], Tensor]) -> Any:
            return op(*(laid_out(of(samples[p], places[p]), p) if p in samples else x for p, x in enumerate(args)))

        if not alone and all(x.dim() <= 5 + places[p] for p, x in samples.items()):
            results = call(lambda x, at: x)
            # Gradients that are not needed have no batch dim.
            return results, tuple(along if y.dim() > 1 else None for y in results)
        each = [call(lambda x, at, n=n: x.select(at, n)) for n in range(info.batch_size)]  # type: ignore[misc]
        results = tuple(torch.stack(ys) for ys in zip(*each, strict=True))
        return results, (0,) * len(results)

    torch.library.register_vmap(op, rule, lib=LIBRARY)
    return rule
