"""The choice of the kernels for gradients: those of the backend that computed the call, or of another that takes its
out and lse.

A :class:`Choice` leaves it to rules, or names the backend. Rules decide in the backward: the library takes only some
strides, and no call knows those of ``dout``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from flashsci.call.problem import Problem
from flashsci.choice import predictions, preferences
from flashsci.choice.backends import BACKENDS, FORWARD_OF_CUDA, OWN, PAIRS, find, kernels

#: In the place of a backend's name: rules choose whose gradients.
BY_RULES = "rules"


class Choice(NamedTuple):
    """The answer to the question who computes a call: constants, so that a compiler keeps it."""

    forward: str  # the backend whose kernels compute the call
    gradients: str  # the backend of its gradients, or BY_RULES
    reason: str = ""  # the rule that chose; empty for a backend that was asked for by name

    @property
    def usual(self) -> str:
        """The backend of the gradients where no rule moves them."""
        return self.forward if self.gradients == BY_RULES else self.gradients

    @property
    def has_own_gradients(self) -> bool:
        """Whether no request names another backend for the gradients."""
        return self.gradients in (self.forward, BY_RULES)

    @property
    def name(self) -> str:
        """The name of the request that makes this choice."""
        return OWN if self[:2] == named(OWN)[:2] else self.forward


def written(choice: Choice) -> str:
    """The choice as a string, which schemas of ops and functorch's trees take for one argument."""
    return f"{choice.forward}|{choice.gradients}"


@functools.cache
def unwritten(text: str) -> Choice:
    """The inverse of :func:`written`, without the reason."""
    forward, _, gradients = text.rpartition("|")
    return Choice(forward, gradients)


def named(name: str) -> Choice:
    """The choice that a request by name is, where that backend can serve the call."""
    if name == OWN:
        return Choice("cuda", "cuda")
    if name in PAIRS:
        forward, _, other = name.partition("/")
        return Choice(forward, other)
    if name in FORWARD_OF_CUDA and name != "cuda:sm90":  # which is to be judged by its own gradients
        return Choice(name, BY_RULES)
    return Choice(name, name)


def by_rules(name: str) -> Choice:
    """The choice of a backend that ``auto`` took for a call with gradients."""
    return Choice(name, BY_RULES) if name == "triton" else named(name)


class GradientKernels(NamedTuple):
    """The backend whose kernels compute the gradients of a call, and the reason for it."""

    backend: str | None  # None: no backend's
    reason: str | None = None  # why it is not the backend itself


def gradients(choice: Choice, problem: Problem, strides: bool = False, anywhere: bool = False) -> GradientKernels:
    """The kernels for the gradients of a call.

    Args:
        strides: whether bias and mask have the strides that the Hopper backward takes; a Problem does not hold them.
        anywhere: ignore whether this machine can run the others.
    """
    module = sharing(choice)
    if module is None:
        return GradientKernels(choice.usual)
    if choice.forward == "triton":
        return _instead_of_triton(module, problem, strides, anywhere)
    name = choice.forward
    generation, lacks = module.backward_kernels(problem, strides)
    order: tuple[str, ...] = (name, "triton")
    why = lacks
    if choice.gradients != BY_RULES:  # no other may answer
        order = (choice.gradients,)
    elif name == "cuda" and lacks is None:
        rule = _rule(problem, generation, "cuda")
        order, why = rule.order, rule.cited()
    for candidate in order:
        reason = lacks if candidate == name else find(candidate).rejects(problem, anywhere)
        if reason is None:
            return GradientKernels(candidate, None if candidate == name else why)
    if order[-1] == name:
        return GradientKernels(None, f"it has no gradients of this call of its own: {lacks}")
    return GradientKernels(
        None,
        f"its gradients would come from the {order[-1]} backend, which cannot serve this call ({reason})",
    )


def _rule(problem: Problem, generation: int, forward: str) -> preferences.Rule:
    """The rule that orders cuda and triton, each of which can compute the gradients."""
    rule = preferences.find("gradients", problem, generation, forward)
    # A Problem does not say whether a mask by pairs differs as the bias does, which predictions take for granted.
    older = generation != 90 and problem.bias and problem.mask_by_query
    if not predictions.enabled() or rule.table != preferences.BY_HAND or older:
        return rule
    names = [name for name in rule.order if name in ("cuda", "triton")]
    found = predictions.of_gradients(problem, forward, names) if len(names) > 1 else {}
    return predictions.reordered(rule, names[0] if names else None, found)


def remark(name: str, choice: Choice, problem: Problem) -> str | None:
    """A note on a call that backend ``name`` serves: whose kernels compute its gradients, if these are another
    backend's or of an older generation than the device's."""
    if not problem.requires_grad:
        return None
    found = gradients(choice, problem)
    kernels = _older_kernels(found.backend, problem)
    if found.backend == choice.forward:
        return f"its gradients come from {name}{kernels}: so short a call is faster by them" if kernels else None
    where = ""
    of_cuda = choice.forward in FORWARD_OF_CUDA
    if of_cuda and gradients(choice, problem, strides=True).backend == choice.forward:
        where = ", where its Hopper backward does not take the strides of bias or mask"
    return f"its gradients come from {found.backend}{kernels}{where}: {found.reason}"


def _older_kernels(name: str | None, problem: Problem) -> str:
    """A note on the older generation of kernels that computes the gradients; empty if none does."""
    if name not in FORWARD_OF_CUDA:
        return ""
    generation = find(name).load().older_backward(problem)
    return f" (sm{generation} kernels)" if generation else ""


def sharing(choice: Choice) -> Any:
    """The module that decides whether its kernels compute the gradients of a call; None if there is no choice."""
    # By name first: a failing attribute look-up on a module costs as much as the rest of a small call.
    if choice.forward == "triton":
        name = "cuda" if choice.gradients == BY_RULES else None
    else:
        name = choice.forward if choice.forward in FORWARD_OF_CUDA else None
    if name is None:
        return None
    module = kernels(name)
    return module if hasattr(module, "backward_kernels") else None


def _instead_of_triton(module: Any, problem: Problem, strides: bool, anywhere: bool) -> GradientKernels:
    """The gradients' choice for a call that Triton computed because ``auto`` chose it."""
    if problem.mask_tiles:  # no other kernels skip the tiles that a mask hides
        return GradientKernels("triton")
    reason = BACKENDS["cuda"].rejects(problem, anywhere)
    generation, lacks = (0, reason) if reason else module.backward_kernels(problem, strides)
    if lacks is None:
        rule = _rule(problem, generation, "triton")
        if rule.order[0] == "cuda":
            return GradientKernels("cuda", rule.cited())
    return GradientKernels("triton")
