"""The known traps that need no GPU, on what runs here; the rest is in tests/gpu."""

import pytest
import torch

from flashsci.registry import BackendError
from flashsci.testing import TRAPS, Skipped

HERE = [name for name, trap in TRAPS.items() if not trap.cuda]
LONG = (
    "seventy_thousand_batch_heads",
    "seventy_thousand_packed_sequences",
)  # minutes in plain PyTorch


@pytest.mark.parametrize(
    "backend, name",
    [("reference", name) for name in HERE if name not in LONG]
    + [
        pytest.param("triton", name, marks=pytest.mark.slow if TRAPS[name].order > 1 else ())
        for name in HERE
        if not TRAPS[name].slow
    ],
)
def test_trap(backend, name):
    TRAPS[name](backend, "cpu")


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
