"""What the host reads cannot be captured in a CUDA graph: such calls are refused before torch fails."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.backends import host_reads
from flashsci.call import arguments
from flashsci.call.torch_state import is_captured

OFFSETS = torch.tensor([0, 1, 4], dtype=torch.int32)
TABLE, LENGTHS = (
    torch.tensor([[1], [0]], dtype=torch.int32),
    torch.tensor([3, 2], dtype=torch.int32),
)


def rows(heads=2, dtype=torch.float32, dim=8):
    return torch.randn(4, heads, dim).to(dtype)


def packed_backward():
    q, dout = rows(), rows()
    out, lse = torch.zeros(4, 2, 8), torch.zeros(2, 4)
    flashsci.attention_backward(
        dout, q, q, q, out, lse, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, backend="reference"
    )


def write():
    caches = torch.zeros(2, 16, 1, 8), torch.zeros(2, 16, 1, 8)
    slots = torch.tensor([5, -1, 3, 20])
    flashsci.write_kv_cache(rows(1), rows(1), *caches, slots, backend="reference")


def eight_bits():
    x = rows(dtype=torch.float8_e4m3fn, dim=32)
    flashsci.varlen_attention(x, x, x, OFFSETS, backend="reference")


READING = {
    "packed": lambda: flashsci.varlen_attention(rows(), rows(1), rows(1), OFFSETS, backend="reference"),
    "packed, compiled": lambda: torch.compile(
        lambda q: flashsci.varlen_attention(q, q, q, OFFSETS, backend="reference"), backend="eager"
    )(rows()),
    "packed backward": packed_backward,
    "packed, 8 bits": eight_bits,
    "paged": lambda: flashsci.paged_attention(
        rows(),
        *torch.randn(2, 2, 16, 1, 8),
        block_table=TABLE,
        seqused_k=LENGTHS,
        cu_seqlens_q=OFFSETS,
        backend="reference",
    ),
    "slots": write,
}


@pytest.mark.parametrize("name", READING)
def test_refused_in_a_capture(name, monkeypatch):
    READING[name]()
    monkeypatch.setattr(host_reads, "is_captured", lambda x: True)
    what = "slots" if name == "slots" else "lengths"
    with pytest.raises(flashsci.BackendError, match=f"reads {what} on the host.*use backend='triton'"):
        READING[name]()


def test_dense_calls_read_nothing(monkeypatch):
    monkeypatch.setattr(host_reads, "is_captured", lambda x: True)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    flashsci.attention(q, q, q, causal=True, backend="reference").sum().backward()


def test_so_is_a_validation(monkeypatch):
    monkeypatch.setattr(arguments, "is_captured", lambda x: True)
    with pytest.raises(ValueError, match=r"values of cu_seqlens_q are read on the host.*leave validate"):
        flashsci.varlen_attention(rows(), rows(), rows(), OFFSETS, validate=True, backend="triton")


def test_tensors_of_a_cpu_are_not_captured():
    assert not is_captured(OFFSETS)
