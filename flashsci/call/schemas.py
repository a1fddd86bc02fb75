"""Schemas of the raw ops, from the fields of the tensors and options of each kind of call, and the definition of an
op in Python.

A field is declared once, in its NamedTuple (kinds.py): its place, its type, and whether it may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call.kinds import fields
from flashsci.call.op_checks import implement, on_one_device

LIBRARY = torch.library.Library("flashsci", "FRAGMENT")

_TYPES = {
    Tensor: "Tensor",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


def arguments(*fields_of: type, prefix: str = "", integer: str = "SymInt") -> str:
    """The arguments of a schema: the fields of these NamedTuples, in order.

    Args:
        prefix: of every name.
        integer: the type of integers: "SymInt" where a compiler may keep them symbolic, else "int".
    """
    found = []
    for field in (field for declaration in fields_of for field in fields(declaration).values()):
        type_name = integer if field.type is int else _TYPES[field.type]
        found.append(f"{type_name}{'?' if field.optional else ''} {prefix}{field.name}")
    return ", ".join(found)


def define_op(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    keys: Sequence[str],
    fake: Callable[..., Any],
) -> Any:
    """The op ``flashsci::<name>``, defined with one kernel for the given dispatch keys and a fake kernel for
    compilers."""
    LIBRARY.define(name + schema)
    for key in keys:
        implement(LIBRARY, name, kernel, key)
    torch.library.register_fake(f"flashsci::{name}", on_one_device(fake), lib=LIBRARY)
    return getattr(torch.ops.flashsci, name).default
