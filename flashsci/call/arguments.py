"""Checks of a user's arguments: every message names the given value, the allowed values and the remedy."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call.kinds import OFFSETS, Argument, Field, Role
from flashsci.call.ops import BATCH_INVARIANT, Scalars
from flashsci.call.row_pitch import differs_by_query
from flashsci.call.torch_state import is_captured, is_readable, transforming
from flashsci.call.transforms import is_mapped, wanted

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PRECISIONS = ("ieee", "tf32x3", "tf32")
SHARED = (
    "causal",
    "window",
    "align",
    "scale",
    "softcap",
    "dropout_p",
    "return_lse",
    "deterministic",
    "precision",
    "softcap_at",
)
BATCH = "batch"  # deterministic, and whatever else is in the batch
ALIGNMENTS = ("upper_left", "lower_right")
SOFTCAP_PLACES = ("scores", "biased")  # of the softcap
# A softcap this many times the scale bounds nothing: products q k^T up to 2^87 do not change, to fp32 rounding.
# Nearer to the end of fp32 the quotient of scale and softcap, or of a score and its cap, would vanish.
BOUNDLESS = 2.0**100


def shape_of(x: Tensor) -> list[int]:
    return list(x.shape)


_INSTEAD = {
    "scale": "multiply q by it, which keeps its gradient, and give scale=1.0; without a gradient, give float(scale)",
    "softcap": "give float(softcap); it has no gradient",
    "dropout_p": "give float(dropout_p)",
}


def number(name: str, x: Any, optional: bool) -> float | None:
    """An option that is a number (or, if ``optional``, None), as a float.

    Plans are stored by the values of options, and kernels take them as constants: neither could follow a tensor that
    changes, or give it a gradient.

    Raises:
        TypeError: not a number.
    """
    kind = type(x)
    if kind is float or (optional and x is None):
        return x
    if isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a number, got a tensor of shape {shape_of(x)}; options are constants of a "
            f"call: {_INSTEAD[name]}"
        )
    if isinstance(x, (torch.SymFloat, torch.SymInt)):
        return x  # type: ignore[return-value]
    if kind is int:  # beyond float's range: infinite, which is refused with the other values
        return float(x) if abs(x) < 1 << 1000 else math.inf if x > 0 else -math.inf
    if kind is not bool and isinstance(x, numbers.Real):  # numpy's scalars are among them
        return float(x)
    allowed = "a number or None" if optional else "a number"
    raise TypeError(f"{name} must be {allowed}, got {_described(x)}")


def flag(name: str, x: Any, advice: str = "") -> bool:
    """An option that is True or False.

    Raises:
        TypeError: any other value, whatever its truth value.
    """
    if type(x) is bool or isinstance(x, torch.SymBool):
        return x  # type: ignore[return-value]
    if type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_"):
        return bool(x)
    if isinstance(x, Tensor):
        advice = f"; bool({name}) reads it on the host"
    raise TypeError(f"{name} must be True or False, got {_described(x)}{advice}")


def _determinism(x: Any) -> bool | str:
    """The option ``deterministic`` if it is not a bool.

    Raises:
        TypeError, ValueError: it is not "batch".
    """
    if type(x) is not str:
        return flag("deterministic", x, f"; {BATCH!r} excludes the influence of the batch, too")
    if x != BATCH:
        raise ValueError(f"deterministic must be True, False, None or {BATCH!r}, got {x!r}")
    return x


def length(name: str, x: Any) -> int | None:
    """A longest length as a host int, or None.

    Raises:
        TypeError: not an int.
        ValueError: negative.
    """
    if x is None:
        return None
    if isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be an int or None, got a tensor; int({name}) reads it on the host (which waits for the "
            "device), and None does without"
        )
    if type(x) is not int:
        if isinstance(x, torch.SymInt):
            return x  # type: ignore[return-value]
        if isinstance(x, bool) or not hasattr(x, "__index__"):
            raise TypeError(f"{name} must be an int or None, got {_described(x)}")
        x = index(x)
    if x < 0:
        raise ValueError(f"{name} must be >= 0, or None where it is unknown, got {x}")
    return x


def _described(x: Any) -> str:
    return "a tensor" if isinstance(x, Tensor) else f"{x!r} of type {type(x).__name__}"


def check_types(q: Any, k: Any, v: Any, **others: Any) -> None:
    """:func:`check_type` of each; the others may be None."""
    check_type("q", q)
    check_type("k", k)
    check_type("v", v)
    for name, x in others.items():
        if x is not None:
            check_type(name, x, " or None")


def check_type(name: str, x: Any, others: str = "") -> None:
    """Check that ``x`` is a tensor, and whole on this rank.

    Raises:
        TypeError: it is something else; ``others``: other things that it may be.
    """
    kind = type(x)
    if kind is Tensor:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{others}, got {kind.__name__}")
    if kind.__name__ == "DTensor":
        raise TypeError(
            f"{name} is a DTensor, of which each rank holds a part; flashsci.attention takes DTensors for all of its tensors, "
            "split by batch or heads, and flashsci.distributed.attention takes those that are split by sequence; elsewhere "
            "call this on x.to_local() of each and wrap the result by DTensor.from_local"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k, v are floating tensors of one dtype on one device.

    Raises:
        TypeError: dtypes that differ or are not floating.
        ValueError: tensors on different devices.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them first")
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k, v must be float16, bfloat16, float32 or float64, got {q.dtype}")
    same_device(q, k=k, v=v)


def same_device(q: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move them to one device")


def check_heads(heads_q: int, heads_k: int, heads_v: int) -> None:
    if heads_k != heads_v:
        raise ValueError(f"k and v must have the same number of heads, got {heads_k} and {heads_v}")
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads, got {heads_q} and {heads_k}"
        )


def check_head_dims(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head dim (last), got {q.shape[-1]} and {k.shape[-1]}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head dims must be at least 1, got {q.shape[-1]} (q, k) and {v.shape[-1]} (v)")


_HALVES = (torch.bfloat16, torch.float16)


def widened(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A 16-bit bias in the wider dtype of q, k, v: exact, and differentiable. A layer under autocast leaves such a
    bias."""
    if bias is None or bias.dtype is dtype or bias.dtype not in _HALVES or dtype in _HALVES:
        return bias
    return bias.to(dtype)


def check_dtype(name: str, x: Tensor, argument: Argument, q: torch.dtype) -> None:
    """Check the dtype of a tensor against its declaration; one that is cast has passed :func:`widened`."""
    allowed = argument.taken(q)
    # Double precision is its own where a kernel has float32 for the others.
    if x.dtype in allowed or (x.dtype is q is torch.float64 and torch.float32 in allowed):
        return
    if x.dtype is torch.bool and argument.role in (Role.SCORES, Role.KEYS):
        raise TypeError(f"{name} is a bool tensor; a bool pattern goes in mask= (True = attend)")
    spelled = {None: f"q's dtype ({q})", torch.bool: "a bool tensor (True = attend)"}
    names = [spelled.get(dtype, str(dtype).removeprefix("torch.")) for dtype in argument.dtypes]
    if argument.widened and q not in _HALVES:
        names[1:1] = ["bfloat16", "float16"]
    words = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    verb = "have" if argument.dtypes[0] is None else "be"
    raise TypeError(f"{name} must {verb} {words}, got {x.dtype}{_CASTS.get(allowed, '')}")


# The advice where one dtype is taken.
_CASTS: dict[tuple[torch.dtype, ...], str] = {
    (torch.float32,): "; call .float()",
    (torch.int32,): "; call .to(torch.int32)",
    (torch.bool,): "; additive terms go in bias=",
}


def check_others(
    declared: Mapping[str, Field],
    given: Sequence[Tensor | None],
    shapes: Mapping[Role, tuple[Sequence[int], str]],
    *checked: Role,
) -> None:
    """Check the tensors beside q, k, v that have these roles, by their declarations: dtype, shape and device.

    Args:
        declared: the fields of a kind of call (:func:`flashsci.call.kinds.fields`), in the order of ``given``.
        given: the tensors of a call, q first.
        shapes: for each role the largest shape, and the names of its last dims.
        checked: roles whose shapes are checked elsewhere.

    Raises:
        TypeError, ValueError: a tensor that does not fit.
    """
    q = given[0]
    assert q is not None
    for field, x in zip(declared.values(), given, strict=True):
        name, argument = field.name, field.argument
        if x is None or argument is None or not (argument.role in shapes or argument.role in checked):
            continue
        check_dtype(name, x, argument, q.dtype)
        if argument.role in shapes:
            full, dims = shapes[argument.role]
            if argument.role is Role.LOGITS and x.shape != tuple(full):
                raise ValueError(f"{name} must be one logit per query head, [{dims}] = {list(full)}, got {shape_of(x)}")
            check_broadcast(name, x.shape, full, dims)
        same_device(q, **{name: x})


def check_broadcast(name: str, shape: Sequence[int], full: Sequence[int], dims: str) -> None:
    """Check that ``shape`` broadcasts to ``full``, whose last dims are ``dims``, without growing it."""
    fits = len(shape) <= len(full) and all(
        a == 1 or a == b for a, b in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} of shape {list(shape)} does not broadcast to [..., {dims}] = "
            f"{list(full)}; "
            "each of its dims must be 1 or match, aligned from the right"
        )


def window_bounds(causal: bool, window: Any) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal closes the right side."""
    left, right = -1, -1
    if window is not None:
        try:
            # A set has no order; True counts as 1; a tensor would be read on the host.
            wrong = not isinstance(window, (tuple, list)) or any(isinstance(side, (bool, Tensor)) for side in window)
            if wrong:
                raise TypeError
            left, right = (-1 if side is None else index(side) for side in window)
        except (TypeError, ValueError) as error:
            raise ValueError(f"window must be (left, right), two ints or None each, got {window!r}") from error
        if left < -1 or right < -1:
            raise ValueError(f"window sides must be >= 0, or -1 or None for unbounded, got {window!r}")
    return left, 0 if causal else right


_CAUSAL = (
    "; the place of the diagonal is align='upper_left' or 'lower_right', a band is window=(left, right), "
    "any other pattern mask="
)


class Options(NamedTuple):
    """The options that all entry points share, with causal and window merged; hashable."""

    window_left: int
    window_right: int
    align: str
    scale: float | None
    softcap: float | None
    dropout_p: float
    return_lse: bool
    deterministic: bool | str  # or BATCH
    precision: str | None
    softcap_at: str = "scores"

    @classmethod
    def of(
        cls,
        causal: bool,
        window: Any,
        align: str,
        scale: float | None,
        softcap: float | None,
        dropout_p: float,
        return_lse: bool,
        deterministic: bool | str | None,
        precision: str | None,
        softcap_at: str = "scores",
    ) -> Options:
        # Chains of identities keep usual calls cheap. Types with equal hashes (1, 1.0 and True) are told apart here,
        # because the keys of plans cannot do it.
        if type(causal) is not bool:
            causal = flag("causal", causal, _CAUSAL)
        if type(return_lse) is not bool:
            return_lse = flag("return_lse", return_lse)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        elif type(deterministic) is not bool:
            deterministic = _determinism(deterministic)
        if scale is not None and type(scale) is not float:
            scale = number("scale", scale, True)
        if softcap is not None and type(softcap) is not float:
            softcap = number("softcap", softcap, True)
        if type(dropout_p) is not float:
            dropout_p = number("dropout_p", dropout_p, False)  # type: ignore[assignment]
        if type(align) is not str:
            raise ValueError(f"align must be one of {ALIGNMENTS}, got {_described(align)}")
        if precision is not None and type(precision) is not str:
            raise ValueError(f"precision must be None or one of {PRECISIONS}, got {_described(precision)}")
        if type(softcap_at) is not str:
            raise ValueError(f"softcap_at must be one of {SOFTCAP_PLACES}, got {_described(softcap_at)}")
        left, right = (-1, 0 if causal else -1) if window is None else window_bounds(causal, window)
        return cls(left, right, align, scale, softcap, dropout_p, return_lse, deterministic, precision, softcap_at)

    def of_ranks(self) -> bool:
        """Whether a call of several ranks is deterministic.

        Raises:
            ValueError: it is to be independent of its batch, too.
        """
        if self.deterministic == BATCH:
            raise ValueError(
                f"deterministic={BATCH!r} is for calls of one device: the parts of ranks follow from the whole call; give True"
            )
        return bool(self.deterministic)

    def keywords(self) -> dict[str, Any]:
        """The arguments of an entry point that give these options."""
        left, right = (None if n < 0 else n for n in self[:2])
        window = None if left is None and right is None else (left, right)
        return {"window": window, **{name: x for name, x in self._asdict().items() if name in SHARED}}

    def check(self) -> None:
        """Raise ValueError for values that do not fit."""
        if self.align not in ALIGNMENTS:
            raise ValueError(f"align must be one of {ALIGNMENTS}, got {self.align!r}")
        if self.scale is not None and not -math.inf < self.scale < math.inf:
            raise ValueError(f"scale must be finite, got {self.scale}")
        if self.softcap is not None and not 0 <= self.softcap < math.inf:
            raise ValueError(f"softcap must be positive (None or 0 for none), got {self.softcap}")
        if not 0.0 <= self.dropout_p < 1.0:
            raise ValueError(f"dropout_p must be in [0, 1), got {self.dropout_p}")
        if self.deterministic == BATCH and self.dropout_p:
            raise ValueError(
                f"deterministic={BATCH!r} excludes dropout, whose entries depend on the place of a sequence in the batch; leave "
                "dropout_p=0.0, or give deterministic=True"
            )
        if self.precision is not None and self.precision not in PRECISIONS:
            raise ValueError(f"precision must be None or one of {PRECISIONS}, got {self.precision!r}")
        if self.softcap_at not in SOFTCAP_PLACES:
            raise ValueError(f"softcap_at must be one of {SOFTCAP_PLACES}, got {self.softcap_at!r}")

    def scalars(self, head_dim: int, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None) -> Scalars:
        """The options as kernels take them, with defaults filled in."""
        scale = 1.0 / math.sqrt(head_dim) if self.scale is None else float(self.scale)
        softcap = float(self.softcap) if self.softcap else 0.0
        biased = self.softcap_at == "biased"  # then it may bound a bias, whatever the scale is
        if softcap and softcap >= BOUNDLESS * abs(scale) and (not biased or softcap >= BOUNDLESS):
            softcap = 0.0
        if self.deterministic == BATCH:
            max_seqlen_q = max_seqlen_k = BATCH_INVARIANT
        return Scalars(
            -1 if max_seqlen_q is None else max_seqlen_q,
            -1 if max_seqlen_k is None else max_seqlen_k,
            scale,
            softcap,
            self.window_left,
            self.window_right,
            self.align == "lower_right",
            float(self.dropout_p) if self.dropout_p else 0.0,
            self.precision or "default",
            bool(self.deterministic),
            biased and _static_sign(softcap) > 0,
        )

    def features(self, tensors: Mapping[str, Tensor | None], needs_grad: bool) -> dict[str, Any]:
        """The fields of a Problem that follow from the options and the tensors of a call, by name."""
        given = tuple([name for name, x in tensors.items() if x is not None])
        bias, key_weight, mask = tensors.get("bias"), tensors.get("key_weight"), tensors.get("mask")
        # A compiler may keep floats symbolic; it is enough to know whether there is a softcap or dropout.
        static = torch.compiler.is_compiling()
        learnt = needs_grad and wanted(tensors.get("alibi_slopes"))
        softcap = _static_sign(self.softcap) if static else float(self.softcap or 0.0)
        # A compiler's tensors do not show the derivatives that transforms want. A backend must know of weights with a
        # sink.
        hidden = static and "key_weight" in given and "sink" in given and transforming()
        return dict(
            # A compiler may keep these symbolic, too; `index` makes it specialise.
            window_left=index(self.window_left),
            window_right=index(self.window_right),
            lower_right=self.align == "lower_right",
            softcap=softcap,
            caps_bias=softcap > 0 and self.softcap_at == "biased" and ("bias" in given or "alibi_slopes" in given),
            dropout_p=_static_sign(self.dropout_p) if static else float(self.dropout_p),
            return_lse=self.return_lse,
            deterministic=bool(self.deterministic),
            batch_invariant=self.deterministic == BATCH,
            precision=self.precision or "default",
            requires_grad=needs_grad,
            bias_dtype=None if bias is None else bias.dtype,
            bias_grad=needs_grad and wanted(bias),
            key_weight="key_weight" in given,
            key_weight_grad=(needs_grad and wanted(key_weight)) or hidden,
            alibi="alibi_slopes" in given,
            alibi_grad=learnt,
            # A tangent, or a derivative under a transform or a compiler.
            alibi_further=learnt and (static or transforming()),
            sink="sink" in given,
            mask=mask is not None,
            mask_by_query=mask is not None and differs_by_query(mask),
            given=given,
        )


def _static_sign(x: float | None) -> float:
    return 0.5 if x else 0.0


def check_cu_seqlens(name: str, offsets: Any, q: Tensor) -> None:
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} must be an int32 tensor [N + 1], got {type(offsets).__name__}")
    check_type(name, offsets)
    check_dtype(name, offsets, OFFSETS, q.dtype)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape [N + 1], got {shape_of(offsets)}")
    same_device(q, **{name: offsets})


def contents_are_seen(offsets: Tensor, validate: bool) -> bool:
    """Whether the host looks at the values of offsets."""
    return (validate or offsets.device.type == "cpu") and is_readable(offsets)


def check_unmapped(name: str, offsets: Tensor) -> None:
    """Raises ValueError for offsets that ``torch.vmap`` maps, where the host is to read them."""
    if is_mapped(offsets):
        raise ValueError(
            f"torch.vmap maps {name}, whose values the host reads here; give the samples as sequences of one call"
        )


def check_cu_seqlens_contents(name: str, offsets: Tensor, total: int, max_seqlen: int | None) -> None:
    """Check that the offsets rise from 0 to ``total`` and no sequence is longer than ``max_seqlen``. Reads them on
    the host.

    Raises:
        ValueError: they do not; or they cannot be read, under torch.vmap or during the capture of a CUDA graph.
    """
    check_unmapped(name, offsets)
    if is_captured(offsets):
        raise ValueError(
            f"values of {name} are read on the host here, which a CUDA graph capture does not allow; leave validate=False, or "
            "call once outside of the capture"
        )
    values = offsets.tolist()
    lengths = [b - a for a, b in itertools.pairwise(values)]
    if values[0] != 0 or values[-1] != total or any(n < 0 for n in lengths):
        raise ValueError(
            f"{name} must rise from 0 to the number of packed rows ({total}) without falling, got {_shortened(values)}"
        )
    if max_seqlen is not None and lengths and max(lengths) > max_seqlen:
        raise ValueError(f"{name} holds a sequence of {max(lengths)} rows, longer than the given maximum {max_seqlen}")


def _shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:6]))}, ..., {values[-1]}]"
