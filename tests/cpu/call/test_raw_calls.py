"""The test of the test: tests/support/raw_calls.py and what tests/gpu makes of it, with plain PyTorch in place of the ops."""

import re

import pytest
import torch

from flashsci.call import op_checks, ops
from tests.support import raw_calls
from tests.support.raw_calls import Findings, attention, gradients

HALF = torch.bfloat16


def sequences(q, k, cu_q, cu_k):
    """Rows and keys of each sequence; all of them where nothing is packed."""
    if cu_q is None:
        return [(slice(None), slice(None))]
    ends = [list(zip(x.tolist(), x.tolist()[1:], strict=False)) for x in (cu_q, cu_k)]
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(*ends, strict=True)]


def options_of(scale, softcap, left, right, lower_right, bias, mask):
    return {
        "scale": scale,
        "softcap": softcap,
        "window": (left, right),
        "lower_right": lower_right,
        "bias": bias,
        "mask": mask,
    }


class Plain:
    """The two ops in fp32, rounded; ``wrong`` changes their results."""

    def __init__(self):
        self.wrong = lambda *results: None

    def __call__(self, name):
        return getattr(self, name)

    def cuda_forward(
        self, q, k, v, bias, mask, cu_q, cu_k, max_q, max_k, scale, softcap, left, right, lower_right, tf32, generation
    ):
        options = options_of(scale, softcap, left, right, lower_right, bias, mask)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        lse = torch.full(q.shape[:-1], -torch.inf)
        for rows, keys in sequences(q, k, cu_q, cu_k):
            part = q[..., rows, :], k[..., keys, :], v[..., keys, :]
            if part[1].shape[-2]:
                found, row = attention(*part, torch.float32, **options)
                out[..., rows, :], lse[..., rows] = found.to(q.dtype), row.float()
        self.wrong(out, lse)
        return out, lse

    def cuda_backward(self, dout, dlse, q, k, v, bias, mask, cu_q, cu_k, out, lse, max_q, max_k, scale, softcap, left, right, lower_right, tf32,
                      deterministic, generation, need):  # fmt: skip
        if generation == 90 and mask is not None and bias is not None:
            raise RuntimeError("no kernel of generation sm90 serves this call on compute capability 9.0")
        options = options_of(scale, softcap, left, right, lower_right, bias, mask)
        dout = torch.zeros_like(out) if dout is None else dout
        found = [torch.zeros_like(x) for x in (q, k, v)] + ([] if bias is None else [torch.zeros_like(bias)])
        if cu_q is not None and int(cu_q.min()) < 0:
            return found  # offsets of any contents
        for rows, keys in sequences(q, k, cu_q, cu_k):
            r, c = (..., rows, slice(None)), (..., keys, slice(None))
            row = (..., rows)
            one = None if dlse is None else dlse[row]
            some, _ = gradients(dout[r], q[r], k[c], v[c], out[r], lse[row], one, torch.float32, **options)
            for x, y, at in zip(found, some, (r, c, c, (...,)), strict=False):
                x[at] = y.to(x.dtype)
        self.wrong(*found)
        return [x if need >> i & 1 else x.new_empty(0) for i, x in enumerate(found)]


@pytest.fixture
def plain(monkeypatch):
    found = Plain()
    monkeypatch.setattr(raw_calls, "op", found)
    monkeypatch.setattr(raw_calls, "DEVICE", "cpu")
    return found


def forward(findings, **options):
    q, k, v = (raw_calls.make((2, h, s, 16), HALF, "bshd") for h, s in ((4, 20), (2, 33), (2, 33)))
    findings.forward("case", q, k, v, **options)


def backward(findings, **options):
    findings.backward_with_bias((2, 4, 2, 20, 33), HALF, (16, 8), 1, 1, 1, 1, **options)


@pytest.mark.parametrize("window, lower_right", raw_calls.WINDOWS)
def test_honest_calls_pass(plain, window, lower_right):
    findings = Findings("sm80")
    options = {"window": window, "lower_right": lower_right}
    forward(findings, softcap=3.0, **options)
    backward(findings, softcap=3.0, dlse=True, extra=1.5, **options)
    backward(findings, bias_dtype=torch.float32, hidden=0.3, pad=5, mask=(2, 1, 1, 33), **options)
    findings.every_use_of_a_bias((2, 4, 2, 20, 33), HALF, (16, 16), 0, 1, 1, 1)
    findings.done()


@pytest.mark.parametrize("call, tensor", [(forward, 0), (forward, 1), *((backward, i) for i in range(4))])
@pytest.mark.parametrize("kind", ["one cell", "nan", "3 %"])
def test_wrong_results_are_found(plain, call, tensor, kind):
    def wrong(*results):
        x = results[tensor]
        if kind == "3 %":
            x *= 1.03
        else:
            x[1, 0, 3] += torch.nan if kind == "nan" else 10 * x.abs().max()

    plain.wrong = wrong
    findings = Findings("sm80")
    call(findings)
    with pytest.raises(
        AssertionError,
        match=r"lse error|error .* > .*, first at \[1, 0, 3|off by a factor 1 \+ 0.0",
    ):
        findings.done()


def test_refusals(plain):
    findings = Findings("sm90")
    backward(findings, mask=(2, 1, 1, 33), refused=True)
    findings.done()
    backward(findings, refused=True)
    backward(findings, mask=(2, 1, 1, 33))
    with pytest.raises(AssertionError) as caught:
        findings.done()
    assert re.search("not refused\n.*serves this call", str(caught.value), re.DOTALL)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (0, 5, 8), (3, 5, 1)])
def test_rows_are_neighbours_in_memory_also_where_there_are_none(shape):
    """``contiguous`` returns a tensor without elements, or with one column, as it is, whatever its strides."""
    x = torch.empty(*shape[:-2], shape[-1], shape[-2]).mT
    assert x.shape == shape and x.stride(-1) != 1 and x.contiguous() is x
    found = op_checks.rows(x)
    assert found.stride(-1) == 1 and found.shape == x.shape
    assert [y.stride(-1) for y in ops.Tensors(x, x, x).inner_contiguous()[:3]] == [1, 1, 1]
