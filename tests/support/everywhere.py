"""For tests that run with and without a GPU: without one Triton interprets (tests/conftest.py), with one the CUDA kernels take part."""

import pytest
import torch

import flashsci

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BACKENDS = ("reference", "sdpa", "triton", *(["cuda"] if GPU else []))
backends = pytest.mark.parametrize("backend", BACKENDS)


def served_on_a_gpu(function, backend, *arguments, **options):
    """``function(backend, "cuda", ...)``; Triton serves every call, another backend's refusal is a reason to skip."""
    try:
        function(backend, "cuda", *arguments, **options)
    except flashsci.BackendError as reason:
        if backend == "triton":
            raise
        pytest.skip(f"{backend} refuses: {reason}")
