"""All ranks call with the same options and matching shapes, or all of them raise, before any data moves.

What must agree is a small table of numbers. The ranks exchange it at the first call of a kind (one all_gather of some fifty
float64, and a wait for it) and keep the answer; later calls of that kind pay a look-up. What the ranks then do differently all
the same (one of them calls with another shape, the others do not) ends in the process group's timeout.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashsci.distributed.collectives import all_gather

Mesh = DeviceMesh
Value = float | str | tuple[int, ...]
Fields = Mapping[str, Value]
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8,
)  # fmt: skip
MOST_KEPT = 4096
_kept: dict[tuple[Any, ...], list[dict[str, float]]] = {}


def group_of(mesh: Mesh | None) -> Any:
    """The process group of a mesh of one dim.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: of several dims.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; "
            "DeviceMesh.from_group(group, device_type) makes one of a process group"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dim, over which the sequence is split, got {mesh.ndim} dims "
            f"{mesh.mesh_dim_names or ''}; name one of them: mesh['name']"
        )
    return mesh.get_group()


def dtype_number(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else -1


def tensor_fields(name: str, x: Tensor | None, named: Mapping[int, str]) -> dict[str, Value]:
    """A tensor's shape, dtype and need of a gradient as fields; ``named`` dims have names of their own."""
    if x is None:
        return {f"{name} dims": -1}
    fields: dict[str, Value] = {f"{name} dims": x.dim(), f"{name} dtype": dtype_number(x.dtype)}
    fields[f"{name} requires grad"] = float(torch.is_grad_enabled() and x.requires_grad)
    for i, size in enumerate(x.shape):
        fields[f"{name} {named.get(i, f'shape[{i}]')}"] = int(size)
    return fields


def rows(*names: str) -> frozenset[str]:
    """The fields in which ranks may differ: rows of these tensors."""
    return frozenset(f"{name} rows" for name in names)


def agree(
    group: Any, fields: Fields, free: frozenset[str], error: Exception | None = None
) -> list[dict[str, float]]:
    """The fields of every rank, which are equal but for those that are ``free``.

    Args:
        group: process group.
        fields: what this rank has; every rank gives the same names, or it is an error that all ranks find.
        error: what this rank found wrong with its own arguments; it is raised here, and the others raise too.

    Raises:
        ValueError: on every rank, where fields differ.
        RuntimeError: where another rank had an error.
    """
    key = (group.group_name, tuple(fields.items()))
    if error is None and key in _kept:
        return _kept[key]
    if group.size() == 1 and error is None:
        return [{name: _number(x) for name, x in fields.items()}]
    table = _exchange(group, fields, error is not None)
    if error is not None:
        raise error
    for rank, row in enumerate(table):
        if row["refused"]:
            raise RuntimeError(
                f"rank {rank} of the mesh refused its arguments; its own error says what is wrong with them"
            )
    _compare(table, free)
    if len(_kept) >= MOST_KEPT:
        _kept.clear()
    _kept[key] = table
    return table


WIDTH = 64


def _exchange(group: Any, fields: Fields, refused: bool) -> list[dict[str, float]]:
    names = list(fields)
    assert len(names) + 3 <= WIDTH
    kind = _number(",".join(names))
    numbers = [float(refused), float(len(names)), kind, *(_number(x) for x in fields.values())]
    mine = torch.tensor(
        numbers + [0.0] * (WIDTH - len(numbers)), dtype=torch.float64, device=_device(group)
    )
    every = all_gather(mine, (WIDTH,) * group.size(), group.group_name)
    table = []
    for row in every.view(-1, WIDTH).tolist():
        same = row[2] == kind
        named = dict(zip(names, row[3:], strict=False)) if same else {}
        table.append({"refused": row[0], "set of arguments": row[2]} | named)
    return table


def _device(group: Any) -> torch.device:
    """Where tensors of this group live; the CPU where it has the choice, which no kernel waits for."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _number(x: Value) -> float:
    """Numbers as they are, of what is longer a hash that is the same in every process."""
    return float(zlib.crc32(str(x).encode())) if isinstance(x, (str, tuple)) else x


def _compare(table: list[dict[str, float]], free: frozenset[str]) -> None:
    first = table[0]
    if any(row["set of arguments"] != first["set of arguments"] for row in table):
        raise ValueError(
            "the ranks of the mesh do not call with the same set of arguments (tensors given, or their numbers of dims); "
            "every rank makes the same call on its own part"
        )
    for name, value in first.items():
        if name not in free and any(row[name] != value for row in table):
            found = ", ".join(f"{row[name]:g}" for row in table)
            raise ValueError(
                f"the ranks of the mesh call with different arguments: {name} is {found} by rank; only the rows of the "
                "sequence may differ"
            )


def refuse(group: Any, error: Exception) -> NoReturn:
    """Tell the others that this rank's arguments are wrong, and raise that."""
    agree(group, {}, frozenset(), error)
    raise error
