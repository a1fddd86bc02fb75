"""tools/distributed/context_parallel.py and examples/long_sequence.py between two processes on the CPU: they end, and say what they found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*command):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def rows(said):
    """Cells of the table that comes last."""
    table = said.rsplit("|---|---|", 1)[1].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_scaling_of_two_ranks():
    said = run("tools/distributed/context_parallel.py", "--device", "cpu", "--tiny")
    found = rows(said)
    seen = [(r[0], r[3], r[4], r[5].removesuffix("*")) for r in found]
    both = [
        (scaling, "2", strategy) for scaling in ("strong", "weak") for strategy in ("ring", "all_gather", "ulysses")
    ]
    assert seen == [
        (scaling, kind, ranks, name)
        for kind in ("forward", "step")
        for scaling, ranks, name in [("strong", "1", "one"), *both]
    ]
    assert sum(r[5].endswith("*") for r in found) == 4, "the choice of auto"
    assert all(float(r[6]) > 0 and re.fullmatch(r"\d+%", r[7]) for r in found)
    assert {r[1] for r in found if r[0] == "weak"} == {"364"}, "pairs of a rank stay"
    assert said.count("| one |") == 4, "as they come, and at the end"


@pytest.mark.slow
def test_what_does_not_fit_into_the_time_is_left_out():
    found = rows(run("tools/distributed/context_parallel.py", "--device", "cpu", "--tiny", "--minutes", "0"))
    assert {r[5] for r in found} == {"no time left"} and len(found) == 6


def test_torchs_context_parallelism_gets_what_it_wants():
    """On the CPU as far as its ring, which has CUDA's kernels alone; what fails there is a row of NaN, and nothing else."""
    code = """
        import argparse, math, os, sys
        sys.path.insert(0, ".")
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from tools.distributed import context_parallel as script

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        options = argparse.Namespace(heads=4, heads_k=2, device="cpu", rounds=1)
        tensors = script.inputs(mesh, 64, options, 16)
        # Apart, ours first: where its ring fails, torch before 2.12 leaves its dispatch behind.
        steps = {"ours": script.ours(mesh, tensors, "auto", True, 64)}, {"torch": script.torchs(mesh, tensors, True)}
        found = script.measured(mesh, steps[0], options) | script.measured(mesh, steps[1], options)
        assert math.isnan(found["torch"][0]) and found["ours"][0] > 0
        sys.stdout.flush()
        os._exit(0)  # threads of gloo may abort a process that ends
    """
    said = run("-c", textwrap.dedent(code))
    assert re.search(r"^torch on rank 0: NotImplementedError: .*flash_attention", said, re.MULTILINE)


@pytest.mark.slow
def test_a_long_sequence():
    """One loss and one gradient, however many ranks share the sequence."""
    found = []
    for ranks, rows in ((1, 192), (2, 96)):
        said = run("examples/long_sequence.py", "--tokens", "192", "--ranks", str(ranks))
        assert f"192 tokens on {ranks} ranks, {rows} on this one: " in said
        assert re.search(r"second call: \d+\.\d\d s, \S+ TFLOP/s", said)
        found.append([float(re.search(rf"{what} (\S+)", said)[1]) for what in ("loss", "gradient")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
