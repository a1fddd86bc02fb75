"""The first call on a GPU on which no kernel has run: the problems, the cache, the switch, the warning, and when it waits."""

from __future__ import annotations

import contextlib
import json
import warnings

import pytest
import torch

import flashsci
from flashsci.backends import reference
from flashsci.call.problem import Problem
from flashsci.choice import choose, first_check
from tests.support.clock import Clock

CPU = torch.device("cpu")
AMPERE, ADA = (8, 0), (8, 9)


@pytest.mark.parametrize("capability", [(7, 5), AMPERE, (12, 0)])
def test_right_results_pass(capability):
    assert first_check.run(capability, CPU, "reference") == {}
    names = first_check.families(capability, CPU)
    assert ("bf16" in names) == ("fp32" in names) == ("fp16, paged" in names) == (capability >= AMPERE)


@pytest.mark.parametrize("name", first_check.families(AMPERE, CPU))
def test_a_wrong_result_of_any_family_is_found(name):
    """Each result off by 10 %, one at a time, and one that is no number."""
    dtype, family = first_check.families(AMPERE, CPU)[name]
    assert first_check.faults(dtype, family, "reference") == []
    genuine = family("reference", None)
    assert ("dq" in genuine) == ("paged" not in name) and ("dbias" in genuine) == ("bias" in name)
    for result, factor in ((r, f) for r in genuine for f in (1.1, float("nan"))):

        def wrong(backend, dtype, result=result, factor=factor):
            found = family("reference", dtype)
            return found | {result: found[result] * factor} if backend == "wrong" else found

        (fault,) = first_check.faults(dtype, wrong, "wrong")
        assert fault.startswith(f"{result}: the largest error is")


def test_a_kernel_that_raises_has_failed(monkeypatch):
    genuine = reference.forward

    def raises(tensors, scalars):
        if tensors.q.dtype != torch.float64:
            raise RuntimeError("no kernel image is available")
        return genuine(tensors, scalars)

    monkeypatch.setattr(reference, "forward", raises)
    found = first_check.run((7, 5), CPU, "reference")
    assert set(found) == set(first_check.families((7, 5), CPU))
    assert set(found.values()) == {"RuntimeError: no kernel image is available"}


def test_modes_of_the_program_do_not_take_part():
    torch.manual_seed(1)
    due = torch.rand(1)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16), flashsci.use_backend("sdpa"):
        assert first_check.run((7, 5), CPU, "reference") == {}
    assert torch.equal(torch.rand(1), due), "the generator of the program is as it was"
    with torch.inference_mode():
        assert first_check.run((7, 5), CPU, "reference") == {}


@pytest.fixture
def ampere(monkeypatch, tmp_path):
    """A GPU that torch pretends to see, with a cache of its own; the checks that ran."""
    ran = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHSCI_CACHE", raising=False)
    monkeypatch.delenv(first_check.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: AMPERE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(first_check, "run", lambda *given: ran.append(given) or ran_outcome)
    ran_outcome: dict[str, str] = {}
    ran_of = type(
        "Ampere", (), {"ran": ran, "outcome": ran_outcome, "cache": tmp_path / "flashsci" / "first_check.json"}
    )
    return ran_of


def test_it_runs_once_per_machine(ampere, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(first_check, "time", clock)
    monkeypatch.setattr(first_check, "run", lambda *given: clock.sleep(0.25) or ampere.ran.append(given) or {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_check.look(AMPERE) and first_check.look(AMPERE)
    assert len(ampere.ran) == 1 and ampere.ran[0] == (AMPERE, torch.device("cuda", 0))
    (entry,) = json.loads(ampere.cache.read_text()).values()
    assert entry["failures"] == {} and entry["seconds"] == 0.25


def test_other_kernels_are_checked_again(ampere, monkeypatch):
    first_check.look(AMPERE)
    monkeypatch.setattr("flashsci.backends.cuda.build_info", lambda: {"units": {"cuda/sm80/fwd_fp16": "other"}})
    first_check.look(AMPERE)
    assert len(ampere.ran) == 2 and len(json.loads(ampere.cache.read_text())) == 2


def test_a_failure_is_said_in_every_process(ampere):
    ampere.outcome["fp16"] = "out: 3 of 64 values are off"
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"NVIDIA A100 \(sm_80\)(.|\n)*fp16: out: 3 of 64(.|\n)*backend='triton'"):
            first_check.look(AMPERE)
    assert len(ampere.ran) == 1


def test_the_switch(ampere, monkeypatch):
    monkeypatch.setenv(first_check.SWITCH, "0")
    assert first_check.look(AMPERE) and ampere.ran == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_cache_is_written_anew(ampere, content):
    ampere.cache.parent.mkdir()
    ampere.cache.write_text(content)
    first_check.look(AMPERE)
    first_check.look(AMPERE)
    assert len(ampere.ran) == 1


def test_a_cache_that_cannot_be_written_is_named(ampere, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept in .*set FLASHSCI_CACHE or XDG_CACHE_HOME"):
        first_check.look(AMPERE)
    assert len(ampere.ran) == 1


def test_a_gpu_that_is_not_here(ampere):
    assert first_check.look(ADA) and ampere.ran == []


def test_it_waits_for_a_call_that_nobody_observes(ampere):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not first_check.look(AMPERE)
    torch.vmap(lambda x: [first_check.look(AMPERE), x][1])(torch.zeros(2))
    assert ampere.ran == []
    assert first_check.look(AMPERE) and len(ampere.ran) == 1


@pytest.fixture
def asked(monkeypatch):
    """The capabilities for which a decision asked, and its answers."""
    found: list = []
    monkeypatch.setattr(choose, "_examined", {None, (9, 0)})
    monkeypatch.setattr(first_check, "look", lambda capability: found.append(capability) or len(found) > 1)
    return found


def test_a_decision_asks_once_it_is_answered(asked):
    problem = Problem(
        device_type="cuda", capability=ADA, dtype=torch.float16, heads_q=4, heads_k=4, head_dim=64, head_dim_v=64,
        batch=(2,), seq_q=8, seq_k=8,
    )  # fmt: skip
    for _ in range(4):
        choose._examine(problem)
    assert asked == [ADA, ADA], "the first was put off"


def test_a_checked_gpu_is_not_asked_about(asked):
    for capability, device in (((9, 0), "cuda"), (ADA, "meta"), (ADA, "cpu")):
        problem = Problem(
            device_type=device, capability=capability, dtype=torch.float16, heads_q=4, heads_k=4, head_dim=64, head_dim_v=64,
            batch=(2,), seq_q=8, seq_k=8,
        )  # fmt: skip
        choose._examine(problem)
    assert asked == []


def test_importing_flashsci_imports_none_of_it():
    import subprocess
    import sys

    program = (
        "import sys, torch, flashsci\n"
        "flashsci.attention(*torch.randn(3, 1, 2, 4, 8).unbind(0))\n"
        "print([m for m in sys.modules if m.startswith(('flashsci.choice.first_check', 'flashsci.testing'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
