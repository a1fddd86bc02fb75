"""The outcome of a choice with the reason of every backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashsci.call.problem import Problem
from flashsci.choice.backends import BACKENDS, check_name
from flashsci.choice.candidates import able, advice, candidates, rejects, rule_of
from flashsci.choice.gradients import by_rules, named, remark


@dataclass(frozen=True)
class Explanation:
    """The outcome of a choice: who was asked for a call, who refused and why. Its ``str`` is made to be read."""

    problem: Problem
    asked: str
    chosen: str | None
    reasons: dict[str, str | None]  # why a backend cannot serve the call; None: it can
    evidence: str = ""
    remarks: dict[str, str] = field(default_factory=dict)  # on backends that can serve it
    #: Kernels of the call and of its gradients, "sm90/triangle_fwd": folders of csrc, in the order of their launches.
    #: None if the backend is not cuda, or if nothing is known of them here.
    kernel: str | None = None
    gradient_kernel: str | None = None

    def __str__(self) -> str:
        p = self.problem
        device = p.device_type if p.capability is None else f"{p.device_type} sm_{p.capability[0]}{p.capability[1]}"
        lines = [f"asked for {self.asked!r}, chosen {self.chosen!r} ({device}, {str(p.dtype).removeprefix('torch.')})"]
        for name, reason in self.reasons.items():
            sign = "->" if name == self.chosen else "  "
            text = "can serve this call" if reason is None else f"no: {reason}"
            if name in self.remarks:
                text += f"; {self.remarks[name]}"
            lines.append(f" {sign} {name:<9} {text}")
        if self.kernel is not None:
            gradients = self.gradient_kernel
            tail = "" if gradients is None else f"; its gradients: {gradients}"
            lines.append(f"    kernels: {self.kernel}{tail}")
        elif self.gradient_kernel is not None:
            lines.append(f"    kernels of its gradients: {self.gradient_kernel}")
        if self.evidence:
            lines.append(f"    order of 'auto': {self.evidence}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(problem: Problem, name: str, strict: bool = False) -> Explanation:
    """The outcome that :func:`flashsci.choice.choose.choose` would have, with every backend's reason."""
    check_name(name)
    tried = candidates(problem, name, strict)
    reasons = {n: rejects(n, problem) for n in dict.fromkeys((*BACKENDS, *tried))}
    chosen = next((candidate for candidate in tried if reasons[candidate] is None), None)
    evidence = f"{' > '.join(tried)}: {rule_of(problem).cited()}" if name == "auto" else ""
    served = by_rules if name == "auto" else named
    remarks = {n: remark(n, served(n), problem) for n, reason in reasons.items() if reason is None}
    known = {n: remark for n, remark in remarks.items() if remark is not None}
    return Explanation(problem, name, chosen, reasons, evidence, known)


def refusal(found: Explanation) -> str:
    """The message for a call that no candidate serves."""
    if found.asked == "auto":
        return "no backend can serve this call: " + "; ".join(f"{n}: {r}" for n, r in found.reasons.items())
    message = f"backend {found.asked!r} cannot serve this call: {found.reasons[found.asked]}"
    return message + advice(able(found.problem, found.reasons))
