"""The agreement of ranks: all call with the same options and matching shapes, or all of them raise, before any data
moves.

The values that must agree are a small table of numbers. They are exchanged in one all_gather of some fifty float64
that the host waits for, through the group's CPU backend if it has one, which waits for no kernel. A rank cannot know
by itself whether the others call as they did before, because the parts of a sequence may have any length. If it is
given the whole length (``total=``, DTensors) it can, and then only the first call of a kind asks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashsci.call import transforms
from flashsci.distributed.collectives import all_gather

Mesh = DeviceMesh
Value = float | str | tuple[int, ...]
Fields = Mapping[str, Value]
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8,
)  # fmt: skip
MOST_KEPT = 4096
Table = list[dict[str, float]]  # the fields of every rank


class Kept:
    """The facts that the ranks of a process group have agreed on, and the objects that they made together."""

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}
        self.met: set[str] = set()  # types of devices on which all ranks have exchanged data
        self.quiet: Any = None  # a communicator for hidden transfers (exchange.py)


# By the group, not by its name: a group that replaces another gets the name of the first.
_kept: WeakKeyDictionary[Any, Kept] = WeakKeyDictionary()


def kept(group: Any) -> Kept:
    return _kept.setdefault(group, Kept())


def trusts() -> bool:
    """Whether a call of a known kind may skip the exchange; not with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    return dist.get_debug_level() != dist.DebugLevel.DETAIL


def group_of(mesh: Mesh | None) -> Any:
    """The process group of a mesh of one dim.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: a mesh of several dims.
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
    group: Any,
    fields: Fields,
    free: frozenset[str],
    device: str = "cpu",
    error: Exception | None = None,
) -> Table:
    """The fields of every rank, which are equal except those that are ``free``.

    Args:
        group: process group.
        fields: the values of this rank. Every rank gives the same names; otherwise all ranks raise.
        device: the type of device that the tensors of the call are on.
        error: an error in this rank's own arguments; it is raised here, and the other ranks raise too.

    Raises:
        ValueError: on every rank, if fields differ.
        RuntimeError: another rank had an error.
    """
    fields = {**fields, "device (a hash)": device}
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
    _meet(group, device)
    return table


def _meet(group: Any, device: str) -> None:
    """Connect the ranks of a group.

    NCCL does so at a group's first operation, in which all ranks must take part. In the ring a rank that sees no key
    of another takes no part.
    """
    met = kept(group).met
    if device != _device(group).type and device not in met:
        hello = torch.zeros(1, dtype=torch.float64, device=device)
        all_gather(hello, (1,) * group.size(), group.group_name)
        met.add(device)


WIDTH = 64


def _exchange(group: Any, fields: Fields, refused: bool) -> list[dict[str, float]]:
    names = list(fields)
    assert len(names) + 3 <= WIDTH
    kind = _number(",".join(names))
    numbers = [float(refused), float(len(names)), kind, *(_number(x) for x in fields.values())]
    mine = torch.tensor(numbers + [0.0] * (WIDTH - len(numbers)), dtype=torch.float64, device=_device(group))
    every = all_gather(mine, (WIDTH,) * group.size(), group.group_name)
    table = []
    for row in every.view(-1, WIDTH).tolist():
        same = row[2] == kind
        named = dict(zip(names, row[3:], strict=False)) if same else {}
        table.append({"refused": row[0], "set of arguments": row[2]} | named)
    return table


def _device(group: Any) -> torch.device:
    """The device for tensors of this group; the CPU if the group allows it, because that waits for no kernel."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _number(x: Value) -> float:
    """A number unchanged; for longer values a hash that is the same in every process."""
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


def check_transforms(entry: str, **tensors: Any) -> None:
    """Refuse the derivatives and mappings that transforms want of the tensors of a call over several ranks.

    Each rank refuses by itself: inside a transform no rank can communicate with another.

    Raises:
        ValueError: as :func:`flashsci.call.transforms.check`; or any of torch.func's transforms around the call.
    """
    transforms.check(entry, **{n: x for n, x in tensors.items() if isinstance(x, Tensor)})
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise ValueError(
            "calls over several ranks cannot be made within torch.func's transforms, which collectives do not pass; differentiate "
            "by torch.autograd.grad, or call outside of them"
        )


def refuse(group: Any, error: Exception) -> NoReturn:
    """Tell the other ranks that this rank's arguments are wrong, and raise the error."""
    agree(group, {}, frozenset(), error=error)
    raise error
