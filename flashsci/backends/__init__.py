"""The implementations behind :func:`flashsci.attention`; flashsci/registry.py chooses among them.

Every backend module has ``unavailable() -> str | None`` (why it cannot run on this machine at all),
``rejects(problem) -> str | None`` (why it cannot serve a call), ``forward`` and ``backward`` with
the arguments of ``flashsci.ops.TENSORS`` and ``flashsci.ops.SCALARS``, and ``FUSED``: whether
flashsci/autograd.py must differentiate it (a fused kernel) or autograd can follow it (plain
PyTorch).
"""
