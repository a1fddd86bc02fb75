"""Calls of the CUDA backend past torch (flashsci/backends/cuda/prepared.py), with a library in Python in place of the compiled one."""

import re
import types
from pathlib import Path

import pytest
import torch

import flashsci
from flashsci.backends import cuda
from flashsci.backends.cuda import prepared
from flashsci.call import plans
from flashsci.call.ops import (
    NEED_BIAS,
    NEED_K,
    NEED_KEY_WEIGHT,
    NEED_Q,
    NEED_V,
    Saved,
    Scalars,
    Tensors,
)

SCALARS = Scalars(-1, -1, 0.25, 0.0, -1, -1, False, 0.0, "tf32x3", False)
CSRC = Path(__file__).parents[3] / "csrc" / "bindings"


class Library:
    """Writes down what it is called with, fills no result, and succeeds as it is told."""

    def __init__(self, succeeds):
        self.calls = []

        def function(name):
            def run(*addresses):
                self.calls.append(dict(zip(prepared.PARAMETERS[name], addresses, strict=True)))
                return int(succeeds)

            return run

        for name in prepared.PARAMETERS:
            setattr(self, name, function(name))


@pytest.fixture
def made(monkeypatch):
    """What the ops that prepare were given, by name."""
    found = {}

    def make(name):
        def op(*arguments):
            found[name] = arguments
            return torch.zeros(8, dtype=torch.uint8)

        return op

    for name in ("cuda_prepared_forward", "cuda_prepared_backward"):
        monkeypatch.setattr(torch.ops.flashsci, name, make(name), raising=False)
    monkeypatch.setattr(prepared, "_stream_of", lambda index: 77)
    return found


def address(x):
    return None if x is None else x.data_ptr()


def tensors(masked=False, heads_last=False):
    shape = (2, 3, 5, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    if heads_last:
        q = torch.randn(2, 5, 3, 8).transpose(1, 2)
    bias = torch.randn(1, 3, 5, 5)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool) if masked else None
    return Tensors(q, k, v, bias, None, mask)


def never(*_):
    raise AssertionError("the general call is for what the library refuses")


class Takes(types.SimpleNamespace):
    """A backend whose kernels take a bias as it lies in memory: never, without gradients, or always."""

    FUSED = True

    def takes_bias(self, tensors, scalars, needs_grad):
        self.asked += 1
        return self.takes == "always" or (self.takes == "forward" and not needs_grad)

    def forward(self, tensors, scalars):
        self.given.append(tensors)
        return tensors.q, tensors.q[..., 0]


@pytest.mark.parametrize("takes", ["never", "forward", "always"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_bias_is_left_to_kernels_that_take_it(takes, needs_grad):
    """Asked once for calls that are alike."""
    module = Takes(takes=takes, asked=0, given=[])
    plan = plans.Plan("some", module, SCALARS)
    strided = tensors()._replace(bias=torch.randn(1, 5, 5, 3).permute(0, 3, 1, 2))
    assert not plan.settled
    for _ in range(3):
        ready = plan.ready(strided, needs_grad)
        left = takes == "always" or (takes == "forward" and not needs_grad)
        assert plan.settled
        assert (ready.bias is strided.bias) == left and plan.as_given == left
        assert left or (ready.bias.stride(-1) == 1 and torch.equal(ready.bias, strided.bias))
    assert module.asked == 1
    columns = strided._replace(v=strided.v.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert plans.Plan("some", module, SCALARS).ready(columns, needs_grad).v.stride(-1) == 1
    plan = plans.Plan("some", module, SCALARS)
    assert plan.ready(tensors(), needs_grad) is not None and plan.as_given


def test_a_plan_of_plain_pytorch_is_settled_by_its_first_call():
    """The second call is the first to be remembered."""
    plans.plans.clear()
    try:
        q = torch.randn(2, 3, 5, 8)
        found = []
        for _ in range(3):
            flashsci.attention(q, q.clone(), q.clone(), backend="eager")
            made = [x for x in plans.plans.values() if isinstance(x, plans.Plan)]
            found.append((len(made), all(x.settled for x in made), len(plans.plans) - len(made)))
        assert found == [(1, True, 0), (1, True, 1), (1, True, 1)]
    finally:
        plans.plans.clear()


@pytest.mark.parametrize("name", prepared.PARAMETERS)
def test_parameters_are_those_of_the_c_functions(name):
    source = "".join(path.read_text() for path in sorted(CSRC.glob("*.cpp")))
    listed = re.search(rf"\b{name}\(([^)]*)\)", source)[1]
    pointers = [x.strip() for x in listed.split(",")]
    assert all(re.fullmatch(r"(const )?void\* \w+", x) for x in pointers)
    assert tuple(x.split()[-1] for x in pointers) == prepared.PARAMETERS[name]


@pytest.mark.parametrize("heads_last", [False, True])
def test_forward_gives_every_call_its_own_addresses(made, heads_last):
    library, first, second = Library(True), tensors(True, heads_last), tensors(True, heads_last)
    run = prepared.PreparedForward(library, first, ("options",), never)
    out, lse = run(second)
    (call,) = library.calls
    q, k, v, bias, _, mask, *_ = second
    expected = dict(q=q, k=k, v=v, bias=bias, mask=mask, cu_seqlens_q=None, cu_seqlens_k=None, out=out, lse=lse)
    assert call == {
        "prepared": run.kept.data_ptr(),
        **{n: address(x) for n, x in expected.items()},
        "stream": 77,
    }
    assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32) and lse.is_contiguous()
    like = made["cuda_prepared_forward"][7]
    assert (like.shape, like.stride()) == (out.shape, out.stride())
    assert made["cuda_prepared_forward"][8:] == ("options",)


@pytest.mark.parametrize("need", [NEED_Q | NEED_K | NEED_V | NEED_BIAS, NEED_Q | NEED_K | NEED_V, NEED_BIAS, NEED_K])
def test_backward_gives_every_call_its_own_addresses(made, need):
    library, first, second = Library(True), tensors(heads_last=True), tensors(heads_last=True)
    out, lse, dout = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5), torch.randn(2, 3, 5, 8)
    saved = Saved(first, out, lse, SCALARS)
    run = prepared.PreparedBackward(library, dout, None, saved, need, ("options",), never)
    found = run(dout, None, second, out, lse)
    (call,) = library.calls
    q, k, v, bias, *_ = second
    expected = dict(dout=dout, dlse=None, q=q, k=k, v=v, bias=bias, mask=None, cu_seqlens_q=None, cu_seqlens_k=None, out=out, lse=lse)  # fmt: skip
    expected |= dict(zip(("dq", "dk", "dv", "dbias"), found[:4], strict=True))
    assert call == {
        "prepared": run.kept.data_ptr(),
        **{n: address(x) for n, x in expected.items()},
        "stream": 77,
    }
    assert found[4] is None
    for i, like in enumerate((q, k, v, bias)):
        assert (found[i] is not None) == bool(need >> i & 1)
        if found[i] is not None:
            assert (found[i].shape, found[i].stride(), found[i].dtype) == (like.shape, like.stride(), like.dtype)
    arguments = made["cuda_prepared_backward"]
    for i, given in enumerate(arguments[11:15]):
        assert (given is None) == (found[i] is None)
        assert given is None or given.stride() == found[i].stride()
    assert arguments[15:] == ("options",)


@pytest.mark.parametrize("need", [NEED_Q | NEED_KEY_WEIGHT, NEED_Q])
def test_key_weights_are_in_the_place_of_a_bias(made, need):
    """Theirs is the fifth gradient, in their own shape."""
    given = lambda: tensors()._replace(bias=None, key_weight=torch.rand(2, 1, 5))  # noqa: E731
    library, first, second = Library(True), given(), given()
    out, lse = prepared.PreparedForward(library, first, ("options",), never)(second)
    weights = made["cuda_prepared_forward"][3]
    assert weights.shape == (2, 1, 1, 5) and address(weights) == address(first.key_weight)
    saved = Saved(first, out, lse, SCALARS)
    run = prepared.PreparedBackward(library, out, None, saved, need, ("options",), never)
    *rows, dbias, dweights = run(out, None, second, out, lse)
    assert all(call["bias"] == address(second.key_weight) for call in library.calls)
    assert dbias is None and library.calls[-1]["dbias"] == address(dweights)
    assert [x is not None for x in rows] == [True, False, False]
    assert (dweights is not None) == bool(need & NEED_KEY_WEIGHT)
    assert dweights is None or dweights.shape == (2, 1, 5)


def test_a_small_lse_that_nobody_reads_has_no_memory_of_its_own(made):
    library, given = Library(True), tensors()
    run = prepared.PreparedForward(library, given, ("options",), never)
    discarding = run.without_lse()
    for x in (given, tensors()):
        out, _ = discarding(x)
        assert library.calls[-1]["out"] == address(out)
        assert library.calls[-1]["lse"] == address(prepared._discarded(given.q.device))
    for _ in range(2):  # who reads it gets one that no later call writes
        _, lse = run(given)
        assert library.calls[-1]["lse"] == address(lse) != address(prepared._discarded(lse.device))
    rows = torch.zeros(1, 1, prepared.MOST_DISCARDED + 1, 8)
    long = prepared.PreparedForward(library, Tensors(rows, rows, rows), (), never)
    assert long.without_lse() is long


def test_what_the_library_refuses_is_left_to_the_op(made):
    """Its message is the op's; results of the refused attempt are not used."""
    library, given = Library(False), tensors()
    run = prepared.PreparedForward(library, given, (), lambda x: ("general", x))
    assert run(given) == ("general", given)
    saved = Saved(given, given.q, torch.zeros(2, 3, 5), SCALARS)
    run = prepared.PreparedBackward(library, given.q, None, saved, 15, (), lambda *x: ("general", *x))
    assert run(given.q, None, given, given.q, saved.lse)[0] == "general"
    assert len(library.calls) == 2


def test_what_is_not_prepared(monkeypatch, made):
    """Empty calls, features that no kernel has, and gradients that do not lie as kernels read them go through the ops."""
    monkeypatch.setattr(cuda.library, "load", lambda: None)
    monkeypatch.setattr(cuda.library, "handle", Library(True))
    monkeypatch.setattr(cuda.library, "fills_results", lambda: False)
    given = tensors()
    assert isinstance(cuda.prepared_forward(given, SCALARS), prepared.PreparedForward)
    empty = given._replace(k=given.k[:, :, :0], v=given.v[:, :, :0], bias=given.bias[..., :0])
    for other in (empty, given._replace(q=given.q[:, :, :0]), given._replace(key_weight=given.q[..., 0])):
        assert not isinstance(cuda.prepared_forward(other, SCALARS), prepared.PreparedForward)
    assert not isinstance(cuda.prepared_forward(given, SCALARS._replace(dropout_p=0.5)), prepared.PreparedForward)

    def backward(dout, out, lse, tensors=given):
        return cuda.prepared_backward(dout, None, Saved(tensors, out, lse, SCALARS), 7)

    out, lse = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5)
    columns = torch.randn(2, 3, 8, 5).transpose(-1, -2)
    assert isinstance(backward(out, out, lse), prepared.PreparedBackward)
    assert isinstance(backward(None, out, lse), prepared.PreparedBackward)
    for other in ((columns, out, lse), (out, columns, lse), (out, out, torch.randn(2, 5, 3).transpose(1, 2))):
        assert not isinstance(backward(*other), prepared.PreparedBackward)
    assert not isinstance(backward(out, out, lse, empty), prepared.PreparedBackward)
    monkeypatch.setattr(cuda.library, "fills_results", lambda: True)
    assert not isinstance(backward(out, out, lse), prepared.PreparedBackward)
    assert not isinstance(cuda.prepared_forward(given, SCALARS), prepared.PreparedForward)
