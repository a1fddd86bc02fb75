"""For tests that run with and without a GPU: without one Triton interprets (tests/conftest.py), with one the CUDA kernels take part."""

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BACKENDS = ("reference", "sdpa", "triton", *(["cuda"] if GPU else []))
backends = pytest.mark.parametrize("backend", BACKENDS)
