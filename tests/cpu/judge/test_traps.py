"""The known traps that need no GPU, on what runs here; the rest is in tests/gpu."""

import pytest
import torch

from flashsci.errors import BackendError
from flashsci.testing import TRAPS, Skipped, Trap, traps, traps_models

pytestmark = pytest.mark.every(4)

HERE = [name for name, trap in TRAPS.items() if not trap.cuda]
LONG = (
    "seventy_thousand_batch_heads",
    "seventy_thousand_packed_sequences",
)  # minutes in plain PyTorch
FUSED = ("lse_of_other_tensor_cores",)  # plain PyTorch takes an lse as it is


@pytest.mark.parametrize(
    "backend, name",
    [("reference", name) for name in HERE if name not in (*LONG, *FUSED)]
    + [
        pytest.param("triton", name, marks=pytest.mark.slow if TRAPS[name].order > 1 else ())
        for name in HERE
        if not TRAPS[name].slow
    ],
)
def test_trap(backend, name):
    TRAPS[name](backend, "cpu")


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_inputs_that_depend_on_each_other(backend):
    """Of these `sdpa` has no other trap, and no other of second order runs in every `make test`."""
    TRAPS["gradients_of_inputs_that_depend_on_each_other"](backend, "cpu")


def test_traps_say_what_they_lack():
    for trap in TRAPS.values():
        if trap.cuda:
            with pytest.raises(Skipped, match="needs a CUDA device"):
                trap("triton", "cpu")


def test_a_backend_that_takes_no_dtype_refuses_the_trap():
    if torch.cuda.is_available():
        pytest.skip("the cuda backend may serve it here")
    with pytest.raises(BackendError):
        TRAPS["odd_strides_shifted"]("cuda", "cpu")


def refuse(dtypes, monkeypatch, *modules):
    """A backend of these dtypes alone, as a generation of CUDA kernels is; returns those that it was asked for."""
    asked = []

    def evaluate(inputs, backend, *arguments, **options):
        asked.append(inputs.q.dtype)
        if inputs.q.dtype not in dtypes:
            raise BackendError(f"no {inputs.q.dtype}")
        return honest(inputs, "reference", *arguments, **options)

    honest = traps.evaluate
    for module in modules:
        monkeypatch.setattr(module, "evaluate", evaluate)
        monkeypatch.setattr(module, "check_alone", lambda *_: None, raising=False)
    return asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["zero_rows_of_dout", "fully_masked_rows", "minus_infinity_in_bias"])
def test_a_trap_judges_what_a_backend_serves_of_it(name, dtype, monkeypatch):
    """Whichever dtype comes first: the others' refusals end nothing."""
    served = {torch.float32} if name == "fully_masked_rows" else {dtype}
    asked = refuse(served, monkeypatch, traps, traps_models)
    TRAPS[name]("some", "cpu")
    assert len(set(asked)) == 3
    refuse(set(), monkeypatch, traps, traps_models)
    with pytest.raises(BackendError):
        TRAPS[name]("some", "cpu")


def test_a_trap_of_one_dtype_takes_the_first_that_is_served(monkeypatch):
    tried = []

    def run(backend, device, dtype):
        tried.append(dtype)
        if dtype != "float16":
            raise BackendError(f"no {dtype}")

    Trap("pit", run, one_of=("bfloat16", "float16", "float32"))("some", "cpu")
    assert tried == ["bfloat16", "float16"]
    with pytest.raises(BackendError, match="no float32"):
        Trap("pit", run, one_of=("bfloat16", "float32"))("some", "cpu")
