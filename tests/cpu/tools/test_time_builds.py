"""Builds of single kernels as candidates of the benchmark (tools/kernels/time_builds.py), on a CPU: a build that computes by the reference."""

from __future__ import annotations

import pytest

from flashsci.backends import reference
from flashsci.choice import backends
from tools import bench
from tools.bench import candidates
from tools.kernels import launchers


@pytest.fixture
def build(monkeypatch):
    """An installed build, without a library."""

    class Fake(launchers.Build):
        def __init__(self, given):
            self.name, self.functions = given.partition("=")[0], {}

        rejects = staticmethod(lambda problem: None)
        forward = staticmethod(reference.forward)
        backward = staticmethod(reference.backward)

    monkeypatch.setattr(launchers, "Build", Fake)
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    found = launchers.install("new=new.so")
    yield found
    del backends.LOADED[backends.ATTENTION]["new"]


def test_an_installed_build_is_a_candidate(build):
    assert candidates.is_ours("new") and not candidates.is_ours("newer")
    with pytest.raises(bench.BenchError, match="no candidate named 'newer'"):
        bench.run([], ["newer"], "cpu")


def test_its_times_and_errors_are_recorded(build):
    records = bench.run(bench.select(ids=["cpu-dense"]), ["new", "sdpa:math"], "cpu", seconds=0.01)
    found = {(r["backend"], r["pass"]): r["gate"] for r in records}
    assert found["new", "forward"] == found["new", "backward"] == "passed"
