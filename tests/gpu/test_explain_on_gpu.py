"""The kernels that explain names are those that a call launches, as the profiler sees them."""

from __future__ import annotations

import re

import pytest
import torch

import flashsci
from flashsci.backends.cuda import decisions
from flashsci.call import ops
from flashsci.testing import generate, make_inputs
from tests.cpu.choice.test_explain import CALLS

_FOLDER = re.compile(r"flashsci::(sm\d\d(?:::\w+)*)::\w+_kernel")


def launched(compute):
    """The folders of the library's kernels that a function launches, in order, each once; and its result."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = compute()
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    found = [match[1].replace("::", "/") for e in events if (match := _FOLDER.search(e.name))]
    return " + ".join(dict.fromkeys(found)) or None, result


def on_gpu(x):
    if not isinstance(x, torch.Tensor):
        return x
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return moved.normal_().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", CALLS)
def test_named_kernels_are_launched(name):
    q, options, *_ = CALLS[name]
    options = {n: on_gpu(x) for n, x in options.items()}
    if options.get("backend") == "cuda:sm90" or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs sm_80")
    q, k, v = (on_gpu(q) for _ in range(3))
    found = flashsci.explain(q, k, v, **options)
    forward, out = launched(lambda: flashsci.attention(q, k, v, **options))
    assert forward == found.kernel, str(found)
    if not out.requires_grad:
        return
    dout = torch.randn_like(out)
    backward, _ = launched(lambda: out.backward(dout))
    assert backward == found.gradient_kernel, str(found)


@pytest.mark.parametrize("seed", range(40))
def test_generated_calls(seed):
    """By decisions about real tensors, whatever their layout."""
    (case,) = generate(seed, 1)
    x = make_inputs(case, torch.device("cuda"))
    if x.q.dtype == torch.float64 or case.variant.varlen or x.key_weight is not None:
        pytest.skip("drawn for other tests")
    rank = x.q.dim()
    bias, mask = (None if t is None else t[(None,) * (rank - t.dim())] for t in (x.bias, x.mask))
    tensors = ops.Tensors(x.q, x.k, x.v, bias, mask=mask).inner_contiguous()
    scalars = ops.Scalars(-1, -1, 0.2, 0.0, -1, -1, False, 0.0, "tf32x3", False)
    kernels = decisions.forward(tensors, scalars)
    given = (*tensors[:4], mask, None, None, *scalars[:7], False, 0)
    if kernels is None:
        with pytest.raises(RuntimeError):
            torch.ops.flashsci.cuda_forward(*given)
        return
    found, _ = launched(lambda: torch.ops.flashsci.cuda_forward(*given))
    folders = dict.fromkeys(n.rpartition("/")[0] for n in kernels if n.startswith("sm"))
    assert (found or "") == " + ".join(folders)
