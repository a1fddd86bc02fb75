"""The known limits: the page, the report of a machine, and that what they say is refused is refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from flashsci import env, limits, versions
from flashsci.backends.cuda import capabilities
from flashsci.call.problem import Problem
from tools.packaging.wheel import RELEASED

ROOT = Path(__file__).resolve().parents[3]
PLAIN = Problem(
    device_type="cuda",
    capability=(9, 0),
    dtype=torch.float16,
    heads_q=4,
    heads_k=4,
    head_dim=64,
    head_dim_v=64,
    batch=(2,),
    seq_q=8,
    seq_k=8,
)
EVERY = sorted({capability for gpu in limits.GPUS for capability in (gpu.first, gpu.last)})


def test_the_page():
    assert (ROOT / "docs" / "limits.md").read_text() == limits.page(), "run python -m flashsci backends --write"


def test_kinds_of_gpu_follow_one_another():
    for earlier, later in itertools.pairwise(limits.GPUS):
        assert earlier.first <= earlier.last < later.first <= later.last
    for arch in RELEASED:
        assert f"sm_{arch}" in limits.of_gpu((int(arch[:-1]), int(arch[-1]))).code


@pytest.mark.parametrize("capability", EVERY)
def test_the_refusals_that_it_names_are_refusals(capability):
    """And no others of these kinds."""
    said = " ".join(limits.about_gpu(capability))
    pytest.importorskip("triton")
    from flashsci.backends import triton

    def refuses(backend, **change):
        return backend.rejects(dataclasses.replace(PLAIN, capability=capability, **change)) is not None

    assert refuses(triton, dtype=torch.bfloat16) == ("bf16 is refused" in said)
    assert refuses(triton, dtype=torch.float8_e4m3fn) == ("8-bit floats are refused" in said)
    wide = dataclasses.replace(PLAIN, capability=capability, dtype=torch.float32, head_dim=160, head_dim_v=160)
    if capability >= (8, 0):
        assert (capabilities._limit("backward", 80, wide, True) is not None) == (limits._WIDE_FP32 in said)
    else:
        assert refuses(capabilities, dtype=torch.float32) and "fp32 is served by `triton`" in said
    paged = dict(paged=True, varlen=True, cache_dtype=torch.float16)
    assert refuses(capabilities, **paged) == ("The paged kernels of `cuda` begin at sm_80" in said)
    assert (limits._NEVER_RUN in said) == (capability not in limits.CHECKED)


def test_gpus_that_nobody_knows():
    assert limits.about_gpu((7, 0)) == [
        "sm_70 is older than sm_75, the oldest that kernels here serve; `auto` takes torch's own"
    ]
    assert "newer than every GPU" in limits.about_gpu((13, 0))[0]


def test_faults_of_versions():
    assert any("activates a name once" in text for text in limits.about_version("torch", "2.10.0+cpu"))
    assert not any("activates a name once" in text for text in limits.about_version("torch", "2.11.0"))
    assert limits.about_version("triton", "3.6.0") and not limits.about_version("triton", "3.6.0", gpu=False)
    assert not any("cuDNN" in text for text in limits.about_version("torch", "2.13.0", gpu=False))
    assert any("gloo" in text for text in limits.about_version("torch", "2.13.0", gpu=False))
    assert any("registers in memory" in text for text in limits.about_version("triton", "3.9.0"))
    assert not any("registers in memory" in text for text in limits.about_version("triton", "3.8.0"))
    for fault in limits.FAULTS:
        assert fault.package in versions.NEWEST and fault.link.startswith(("", "https://github.com/"))


def test_the_report_has_the_limits_of_its_gpus(monkeypatch):
    found = {"version": "2.13.0", "cuda": "13.0", "gpus": [["NVIDIA L4, sm_89, 24 GiB", [8, 9]]] * 2}
    monkeypatch.setattr(env, "_python", lambda code, timeout=0: found)
    parts = [(part.what, part.value) for part in env.torch()]
    assert parts[1:3] == [("GPU 0", "NVIDIA L4, sm_89, 24 GiB"), ("GPU 1", "NVIDIA L4, sm_89, 24 GiB")]
    said = [value for what, value in parts if what.startswith("limit of GPU")]
    assert said == limits.about_gpu((8, 9)), "once for GPUs of one kind"
    assert [value for what, value in parts if what == "limit of torch"] == limits.about_version("torch", "2.13.0")
