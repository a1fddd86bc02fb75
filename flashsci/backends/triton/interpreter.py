"""Triton's interpreter, made to work with NumPy 2.4 and newer.

Triton 3.6 keeps scalars as arrays of one element and calls ``int`` on them, which NumPy 2.4 refuses; loop bounds fail.
Imported in interpreter mode only.
"""

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
