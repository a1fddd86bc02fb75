"""`@kernel`: `triton.jit` for kernels whose arguments come in tuples."""

import triton
from triton.runtime.jit import JITFunction

from .groups import ROWS, RUNTIME


class Kernel(JITFunction):
    """A JIT function whose `do_not_specialize` also holds for numbers in tuples, and which never knows that rows are neighbours.

    Triton 3.6 reads `do_not_specialize` for arguments, not for the contents of a tuple: it would compile a kernel again
    for every number that is 1 or a multiple of 16. Of rows of one number, 1 apart, it would hold a tile transposed, and the
    results of such a kernel were garbage on Hopper.
    """

    def create_binder(self):
        *caches, binder = super().create_binder()

        def bind(*args, **options):
            bound, specialization, options = binder(*args, **options)
            found = [
                general(kind, value) if p.do_not_specialize else rows_apart(p.name, kind, value)
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


def rows_apart(name, kind, value):
    """The same of any argument, with the stride of rows not compiled in if it is 1. name: of the argument or field."""
    if not isinstance(kind, tuple):
        return kind, value
    if type(kind) is tuple and name in ROWS:
        last, known = general(kind[-1], value[-1])
        return ((*kind[:-1], last), (*value[:-1], known)) if kind[-1] == "constexpr" else (kind, value)
    names = getattr(kind, "_fields", (name,) * len(kind))
    kinds, values = zip(*map(rows_apart, names, kind, value), strict=True)
    return kinds if type(kind) is tuple else type(kind)(*kinds), values


def kernel(function):
    if triton.knobs.runtime.interpret:
        return triton.jit(function)
    return Kernel(function, do_not_specialize=RUNTIME)
