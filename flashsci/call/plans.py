"""Plans: the decisions made once for calls of one kind: whose kernels compute them, with which options, and how they
launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_, is_not
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashsci.call import bias_copy, mask_tiles, repeats, row_pitch
from flashsci.call.kinds import Dense
from flashsci.call.ops import Given, Saved, Scalars, Tensors, raised, unobserved, with_inner_keys
from flashsci.call.torch_state import casts_to, is_traced, rounds_products, transforming
from flashsci.call.transforms import wanted
from flashsci.choice import backends, differentiate
from flashsci.choice.gradients import Choice

autocasting = torch._C._is_any_autocast_enabled
deterministic, grad_enabled = torch._C._get_deterministic_algorithms, torch.is_grad_enabled


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The properties of tensors that plans depend on: shape, strides, dtype and device of each."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Flags of the tensors for which a call needs derivatives, and of transforms: never empty, so that it counts as true."""
    if transforming():
        return (*map(wanted, tensors), True)
    return tuple([x is not None and x.requires_grad for x in tensors])


Run = Callable[[Given], tuple[Tensor, Tensor]]
Gradients = tuple[Tensor | None, ...]


def _prepared_forward(module: Any, tensors: Tensors, scalars: Scalars) -> Run:
    """A module's forward for plain tensors with the signature of these, in their order, with everything else
    decided."""
    if hasattr(module, "prepared_forward"):
        found: Run = module.prepared_forward(tensors, scalars)
        return found
    return lambda tensors: module.forward(Tensors(*tensors), scalars)


class Plan:
    """The decisions that follow from a call's tensors (by their signature) and options, and the function that
    computes it.

    Inside a model, between other work, a call costs the host several times its cost in a loop: nothing that Python
    touches is in a cache. Therefore all decisions are made once for calls of one kind.
    """

    __slots__ = (
        "_backwards",
        "_copied",
        "_forward",
        "_leaves_bias",
        "_ragged",
        "_tabled",
        "as_given",
        "choice",
        "gated",
        "leading",
        "module",
        "rank",
        "scalars",
        "settled",
    )

    def __init__(
        self,
        choice: Choice,
        module: ModuleType,
        scalars: Scalars,
        leading: tuple[int, ...] | None = None,
        rank: int | None = None,
    ) -> None:
        self.choice, self.module, self.scalars = choice, module, scalars
        # Leading dims to expand q, k, v to; None: equal ranks and dims already.
        self.leading = leading
        # The rank of q, k, v that bias, mask and key weights are to be raised to; None: they have it.
        self.rank = rank
        # Whether `ready` has found out what it does, or a backend that takes tensors as they are has computed a call.
        self.settled = False
        self.as_given = False  # whether kernels are known to take these tensors without a copy
        self._leaves_bias = True  # whether kernels take it as it is
        self._ragged: tuple[bool, bool] | None = None  # whether bias and mask are copied for their rows
        self._tabled: bool | None = None  # whether a table of the mask's tiles is made
        self._copied: Callable[[Tensor], Tensor] = with_inner_keys  # how other kernels get it
        self._forward: Run | None = None
        self._backwards: dict[tuple[Any, ...], Any] = {}
        self.gated: Any = None  # of a call with a gate of pairs: its GatedCalls, see gate_nodes.py

    @property
    def reads_tables(self) -> bool:
        """Whether its kernels read the table of a mask."""
        return mask_tiles.reads(self.module)

    def computes_by(self, table: Tensor, given: Dense, held: bool) -> bool:
        """:func:`mask_tiles.serves` for its choice."""
        return mask_tiles.serves(table, given, self.module, self.choice.has_own_gradients, held)

    def raised(self, tensors: Given) -> Tensors:
        """The tensors at one rank: views, which a compiler may see."""
        return Tensors(*tensors) if self.rank is None else raised(tensors, self.rank)

    def ready(self, tensors: Tensors, needs_grad: bool, direct: bool = False) -> Tensors:
        """The tensors as kernels take them, with copies where needed. ``direct``: they are plain (``ops.bypasses_dispatcher``)."""
        tensors = tensors if self.rank is None else self.raised(tensors)
        rows = tensors.inner_contiguous(None)
        if not self.settled:
            # A copy that the gradients need as well is made here, for both.
            strided = rows.has_strided_bias() and hasattr(self.module, "takes_bias")
            self._leaves_bias = strided and self.module.takes_bias(rows, self.scalars, needs_grad)
            if rows.has_strided_bias() or row_pitch.ragged_bias(rows):
                self._copied = bias_copy.choose(rows)
            self.settled = True
        copied = self._copied if direct else with_inner_keys
        given = rows if self._leaves_bias else rows.inner_contiguous(copied)
        if self._tabled is None:
            self._tabled = self.makes_table(given)
        if self._tabled:  # tiles that hide nothing are not read, so that a copy of the mask does not pay
            given = mask_tiles.with_table(given)
        ragged = self._ragged
        if ragged is None:
            ragged = row_pitch.ragged(given)
            if ragged[0] and not needs_grad and self._reads_ragged_bias(given):
                ragged = False, ragged[1]
            self._ragged = None if is_traced() else ragged
        if ragged[0] or ragged[1]:
            of_mask = bias_copy.choose_for(given.mask) if direct else with_inner_keys
            given = row_pitch.whole_rows(given, copied, of_mask, ragged)
        self.as_given = given is tensors and self._ragged is not None
        return given

    def _reads_ragged_bias(self, tensors: Tensors) -> bool:
        """Whether its kernels read a bias whose rows begin anywhere as fast as a copy."""
        reads = getattr(self.module, "reads_ragged_bias", None)
        return reads is not None and bool(reads(tensors, self.scalars))

    def makes_table(self, tensors: Tensors) -> bool:
        """Whether a table of the mask's tiles is made for a call that has none."""
        if self.scalars.batch_invariant():  # whether a table pays depends on the batch
            return False
        return self.reads_tables and tensors.mask_tiles is None and mask_tiles.pays(tensors)

    def tabled(self, tensors: Tensors) -> Tensors:
        """The tensors, with a table of the mask's tiles where one is made."""
        return mask_tiles.with_table(tensors) if self.makes_table(tensors) else tensors

    def to_save(self, tensors: Tensors, needs_grad: bool, direct: bool) -> Tensors:
        """The tensors to compute from and to save for gradients: those of the call where kernels take them.

        Repeats of the call save the same: a checkpoint compares what a call and its recomputation save.
        """
        if not self.as_given:
            ready = self.ready(tensors, needs_grad, direct)
            return tensors if direct and self.as_given else ready
        return tensors if direct else self.raised(tensors)

    def prepared(self, tensors: Given) -> Run:
        """A function that computes out and lse of plain tensors like these, as kernels take them or of lower ranks."""
        run = self._forward
        if run is None:
            run = _prepared_forward(self.module, self.raised(tensors), self.scalars)
            self._forward = run = run if self.rank is None else _of_lower_ranks(run, self.raised)
        return run

    def repeated_backward(self, dout: Tensor | None, dlse: Tensor | None, saved: Given, need: int) -> Gradients | None:
        """:meth:`backward` where an equal backward has been computed before; else None. Takes tensors of any kind.
        ``saved``: with out and lse."""
        kept = self._backwards.get((need, dout is None, dlse is None))
        if kept is None or not alone():
            return None
        run = repeats.find(kept, [x for x in (*saved, dout, dlse) if x is not None])
        if run is None:
            return None
        *tensors, out, lse = saved
        found: Gradients = run(dout, dlse, tensors, out, lse)
        return found

    def backward(self, dout: Tensor | None, dlse: Tensor | None, saved: Given, need: int) -> Gradients:
        """dq, dk, dv, dbias, dkey_weight of plain tensors, None where ``need`` does not name them. ``saved``: with
        out and lse."""
        # All tensors are examined: hooks of saved tensors may have returned others than were given.
        key = (need, *signature(*saved, dout, dlse))
        *tensors, out, lse = saved
        run = self._backwards.get(key)
        if run is None:
            given = Tensors(*tensors)
            kept = Saved(given.laid_out(), out, lse, self.scalars)
            run = differentiate.prepared_backward(self.choice, dout, dlse, kept, need)
            if kept.tensors is not given:
                run = _laying_out(run)
            if len(self._backwards) >= MOST_BACKWARDS:
                self._backwards.clear()
            self._backwards[key] = run
        present = [x for x in (*saved, dout, dlse) if x is not None]
        repeats.keep(self._backwards, (need, dout is None, dlse is None), present, run)
        found: Gradients = run(dout, dlse, tensors, out, lse)
        return found


def _of_lower_ranks(run: Any, raised: Callable[[Given], Tensors]) -> Run:
    """A prepared forward that also takes the tensors from which ``raised`` makes views. The strides are in ``run``; the
    views have the addresses of the tensors, so that a function of addresses needs no views."""
    if hasattr(run, "at_addresses"):
        found: Run = run.at_addresses(raised)
        return found
    return lambda given: run(raised(given))


def _laying_out(run: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A prepared backward for tensors that must be copied first."""

    def backward(dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor) -> Gradients:
        return run(dout, dlse, Tensors(*tensors).laid_out(), out, lse)

    return backward


# Plans by the keys that the entry points make. Repeated calls are stored here too, so that none outlives its plan.
plans: dict[tuple[Any, ...], Any] = {}
MOST_PLANS, MOST_BACKWARDS = 4096, 64


def keep(key: tuple[Any, ...], plan: Any) -> Any:
    """The plan, stored under its key."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


Call = tuple[Any, Sequence[Tensor]]  # the key of a call, and its tensors


def alone() -> bool:
    """Whether nothing observes a call's ops and no tangents are active; no comparison of tensors sees tangents."""
    return unobserved() and forward_ad._current_level < 0


# For `filter` and `map` over the arguments of a call, which then run no Python.
absent, present = functools.partial(is_, None), functools.partial(is_not, None)


def repeated(
    entry: Any, given: tuple[Any, ...], options: tuple[Any, ...], window: Any, backend: str
) -> tuple[Run | None, Call | None]:
    """The run of an earlier call that this one repeats, and the key by which :func:`remember` stores this one.

    No argument has been checked yet: the first call of a kind goes another way, and calls that raise there are not
    remembered. Both results are None where a call must be examined: if something else observes its ops, or if it
    cannot be a plain one.

    Args:
        entry: names of the arguments and of the absent tensors.
        given: all tensors that are present, q and k first.
        options: all further arguments; window and backend are separate.
    """
    if not unobserved() or forward_ad._current_level >= 0:  # as in `alone`
        return None, None
    try:
        q = given[0]
        key = (
            # No shapes, because torch makes them anew at each request; the comparison sees them.
            entry, q.numel(), given[1].numel(), options, window,
            # 1, 1.0 and True are equal to a dict, but not to our checks.
            tuple(map(type, options if window is None else (*options, *window))),
            backends.requested(backend), grad_enabled(), deterministic(),
            q.dtype is torch.float32 and rounds_products(q.dtype), autocasting() and casts_to(q),
        )  # fmt: skip
        kept = plans.get(key)
        return None if kept is None else repeats.find(kept, given), (key, given)
    except (AttributeError, RuntimeError, TypeError):
        # Not a tensor; or a list or a symbol, which has no hash.
        return None, None


def as_given(call: Call | None, *tensors: Tensor | None) -> Call | None:
    """The call, if it computes with the tensors it was given: casts and reshapes are not part of a repeat."""
    used = [x for x in tensors if x is not None]
    same = call is not None and len(call[1]) == len(used) and all(map(is_, call[1], used))
    return call if same else None


def remember(call: Call, run: Run) -> None:
    """Store the run of a call of plain tensors so that :func:`repeated` finds it."""
    if len(plans) >= 2 * MOST_PLANS:
        plans.clear()
    repeats.keep(plans, *call, run)
