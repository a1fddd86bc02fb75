"""Processes with gloo (on GPUs: NCCL) between them, started once and fed with functions: what a test of collectives needs."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

WORLD = 4
TIMEOUT = 60  # seconds of a collective
GRACE = 10  # beyond it, after which a process shows where it is
PATIENCE = 240  # of a whole case


def _rank(rank: int, world: int, device: str, folder: str, pipe: Any, timeout: float, bound: bool) -> None:
    """A process: (function, size of the mesh, arguments) comes, (what went well, what went wrong) goes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    torch.set_num_threads(1)
    patience = timedelta(seconds=timeout)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=patience,
        device_id=torch.device(device, rank) if bound else None,
    )
    meshes: dict[Any, Any] = {}
    for size in range(1, world + 1):  # the ranks beyond a mesh do nothing
        group = dist.new_group(list(range(size)), timeout=patience)
        if rank < size:
            meshes[size] = DeviceMesh.from_group(group, device)
    if world == 4:
        meshes["2x2"] = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "cp"))
    trace = open(f"{folder}/trace{rank}", "w")  # noqa: SIM115
    pipe.send("ready")
    while True:
        function, size, arguments = _loads(pipe.recv_bytes())
        # Who hangs says where: what ends a collective leaves no traceback.
        faulthandler.dump_traceback_later(timeout + GRACE, file=trace)
        try:
            pipe.send_bytes(_dumps((function(meshes[size], **arguments), None)))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            pipe.send_bytes(_dumps((None, (told, traceback.format_exc()))))
        finally:
            faulthandler.cancel_dump_traceback_later()


def _dumps(x: Any) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def _loads(x: bytes) -> Any:
    return torch.load(io.BytesIO(x), map_location="cpu", weights_only=False)


def _answer(pipe: Any) -> tuple[Any, Any]:
    try:
        answer: tuple[Any, Any] = _loads(pipe.recv_bytes())
    except EOFError:
        return None, ("died", "")
    return answer


def _told(found: list[tuple[Any, Any]]) -> str:
    """What went wrong on which ranks."""
    return "\n".join(f"rank {r}: {error[0]}\n{error[1]}" for r, (_, error) in enumerate(found) if error)


class Ranks:
    """The processes, from the side of the test."""

    def __init__(
        self,
        timeout: float = TIMEOUT,
        world: int = WORLD,
        device: str = "cpu",
        patience: float = PATIENCE,
        bound: bool = False,
    ) -> None:
        """``bound``: each process says which GPU is its own, so that NCCL connects them at once."""
        self.patience = patience
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.mkdtemp()
        hidden = os.environ.pop("TRITON_INTERPRET", None)
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (rank, world, device, self.folder, there, timeout, bound)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()  # the process has its own: the death of that one is the end of the pipe
            self.pipes.append(here)
            self.processes.append(process)
        if hidden is not None:
            os.environ["TRITON_INTERPRET"] = hidden
        for pipe in self.pipes:
            assert pipe.poll(patience), "a process did not start"
            assert pipe.recv() == "ready"

    def outcomes(self, function: Callable[..., Any], size: Any, **arguments: Any) -> list[tuple[Any, Any]]:
        """(result, None) or (None, (error, traceback)) of each rank of the mesh of this size; the error of a dead one is "died"."""
        pipes = self.pipes[: None if isinstance(size, str) else size]
        job = _dumps((function, size, arguments))
        for pipe in pipes:
            pipe.send_bytes(job)
        until = time.monotonic() + self.patience
        late = [not pipe.poll(max(0.0, until - time.monotonic())) for pipe in pipes]
        found = [
            (None, ("does not answer", self.trace(rank))) if silent else _answer(pipe)
            for rank, (pipe, silent) in enumerate(zip(pipes, late, strict=True))
        ]
        # Its answer, if it comes, would be taken for that of the next call.
        assert not any(late), _told(found)
        return found

    def run(self, function: Callable[..., Any], size: Any, **arguments: Any) -> list[Any]:
        """What ``function(mesh, **arguments)`` gives on each rank."""
        found = self.outcomes(function, size, **arguments)
        assert not any(error for _, error in found), _told(found)
        return [result for result, _ in found]

    def trace(self, rank: int) -> str:
        """Where a process was when its call took longer than a collective may."""
        return Path(self.folder, f"trace{rank}").read_text()

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
