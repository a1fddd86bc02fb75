"""The implementations behind :func:`flashsci.attention`; flashsci/registry.py chooses among them.

A backend module says why it cannot run on this machine at all (``unavailable() -> str | None``), which calls it
cannot compute (``rejects(problem) -> str | None``) and computes the others: ``forward(tensors, scalars)`` and
``backward(dout, dlse, saved, need)``, with the tuples of flashsci/ops.py. ``FUSED`` says whether
flashsci/autograd.py must differentiate it (a fused kernel) or autograd can follow it (plain PyTorch).
docs/develop/extending.md has the whole contract. Backends answer what they *can* compute; what they *should* is the
registry's. They import nothing above flashsci/ops.py.
"""
