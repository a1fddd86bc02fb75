"""Outcomes of a cell: right, refused, wrong, raw, crashed, or torch's own failure; and which errors are refusals."""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

import flashsci

RIGHT, REFUSED, WRONG, RAW, CRASHED, ABSENT = "right", "refused", "wrong", "raw", "crashed", "-"
BAD = (WRONG, RAW, CRASHED)
TORCHS = "torch's"  # torch's own scaled_dot_product_attention, which served the call, fails in the same way by itself

# What a message tells the reader to do.
ADVICE = re.compile(
    r"\b(use|call|give|pass|instead|detach|wrap|compute|cast|leave|make|move|put|set|train|redistribute|unwrap|to_local|install|clone)\b"
)
# Errors of torch itself about its own features, which name the feature: (part of the message, what it is about).
OF_TORCH: tuple[tuple[str, str], ...] = (
    (
        "vmap: inplace arithmetic(self, *extra_args) is not possible",
        "torch's vmap writes nothing in place",
    ),
    (
        "input_tensor must be a FunctionalTensor",
        "no op writes into a copy of a constant under torch's AOTInductor; give the tensor as an input",
    ),
    (
        "Mutating a variable from outside the scope of this HOP",
        "torch 2.11 compiles no context inside a checkpoint that sets a value; put use_backend around the compiled call",
    ),
    (
        "in is_preferred_layout_as_bmm_input",
        "torch's inductor on a CPU multiplies no matrices whose number of rows is read from data; use backend='aot_eager'",
    ),
    (
        'identifier "float8_e4m3fn" is undefined',
        "torch's fuser of TorchScript has no 8-bit floats on GPUs; use torch.compile",
    ),
)
# Dynamo repeats an error that it met while tracing, with its type and message; and the reason why a function is not traced.
TOLD_BY_DYNAMO = re.compile(
    r"raised exception (?:TypeError|ValueError|BackendError|NotImplementedError)\([^\"']*[\"'](.*?)[\"'][^\"']*\) For more"
    r"|function `<function \w+ at \w+>` since it was wrapped with `torch.compiler.disable` \(reason: (.*?flashsci.*?)\)"
)
_HOME = flashsci.__file__.rpartition("/")[0]
_OURS = (TypeError, ValueError, flashsci.BackendError, NotImplementedError)


class Outcome(NamedTuple):
    kind: str
    why: str = ""


def outcome_of(error: BaseException) -> Outcome:
    """Of what a cell raised."""
    message = " ".join(str(error).split())
    said = f"{type(error).__name__}: {message[:400]}"
    for part, about in OF_TORCH:
        if part in message:
            return Outcome(REFUSED, about)
    told = TOLD_BY_DYNAMO.search(message)
    if told:
        message = told.group(1) or told.group(2)
    if (told or is_ours(error)) and ADVICE.search(message):
        return Outcome(REFUSED, message[:400])
    return Outcome(RAW, said)


def is_ours(error: BaseException) -> bool:
    """Whether this package raised it; a compiler may have wrapped it, not as an error of its own."""
    if "Internal" in type(error).__name__:
        return False
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.extract_tb(seen.__traceback__)
        if isinstance(seen, _OURS) and frames and frames[-1].filename.startswith(_HOME):
            return True
        seen = seen.__cause__ or seen.__context__
    return isinstance(error, flashsci.BackendError)
