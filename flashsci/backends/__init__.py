"""The implementations behind :func:`flashsci.attention`; flashsci/choice/choose.py chooses among them.

A backend module has four parts. ``unavailable() -> str | None`` says why it cannot run on this machine at all,
``READS`` declares the tensors that it reads (a call that gives another one is refused: it would be ignored),
``rejects(problem) -> str | None`` says why it cannot compute a call, and ``forward(tensors, scalars)`` and
``backward(dout, dlse, saved, need)`` compute the others, with the tuples of flashsci/call/ops.py. ``FUSED`` says whether
flashsci/call/autograd.py must differentiate it (a fused kernel) or autograd can follow it (plain PyTorch).
docs/develop/extending.md has the whole contract. Backends say which calls they *can* compute; the choice decides
which they *should*. They import nothing above flashsci/call/ops.py.
"""
