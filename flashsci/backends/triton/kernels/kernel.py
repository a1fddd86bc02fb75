"""`@kernel`: `triton.jit` for kernels whose arguments come in tuples."""

import triton
from triton.runtime.jit import JITFunction

from .groups import RUNTIME


class Kernel(JITFunction):
    """A JIT function whose `do_not_specialize` also holds for numbers in tuples.

    Triton 3.6 reads it for arguments, not for the contents of a tuple: it would compile a kernel again for every
    number that is 1 or a multiple of 16.
    """

    def create_binder(self):
        *caches, binder = super().create_binder()

        def bind(*args, **options):
            bound, specialization, options = binder(*args, **options)
            found = [
                general(kind, value) if p.do_not_specialize else (kind, value)
                for p, (kind, value) in zip(self.params, specialization, strict=True)
            ]
            return bound, found, options

        return *caches, bind


def general(kind, value):
    """Triton's (type, compiled-in value) of an argument, with no value compiled in."""
    if isinstance(kind, tuple):
        kinds, values = zip(*map(general, kind, value), strict=True)
        return kinds if type(kind) is tuple else type(kind)(*kinds), values
    return "i32" if kind == "constexpr" and value == 1 else kind, None


def kernel(function):
    if triton.knobs.runtime.interpret:
        return triton.jit(function)
    return Kernel(function, do_not_specialize=RUNTIME)
