"""Seven repairs of Triton's interpreter (seen in 3.6), imported in interpreter mode only.

- It stores scalars as arrays of one element and calls ``int`` on them, which NumPy 2.4 refuses: loop bounds fail.
- It replaces parts of triton.language while a kernel runs: two threads would undo each other's changes. Now one runs at a time.
- At every call of a device function it searches triton.language for parts to replace, which are replaced already: more than
  half of its time. Now it does so once for each file and launch.
- It wraps the shape of every tensor and of its type anew, dimension by dimension, and makes a table of all types to look one
  up: a third of the time that is left. Now it does so once for each shape and once for each type.
- It cuts fp32 to bfloat16 toward zero, where every GPU rounds to nearest: results are too small.
- It does not round fp32 to 8-bit floats to nearest, ties to even.
- It reads the NaN and infinities of 8-bit floats as numbers.
"""

import functools
import math
import threading

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float


def _patch_with_index(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_EIGHT_BITS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_WIDER = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}


def _convert_to_nearest(data, input_dtype, output_dtype, rounding_mode):
    if input_dtype == tl.float32 and output_dtype in _EIGHT_BITS:
        exact = torch.from_numpy(numpy.ascontiguousarray(data, dtype=numpy.float32))
        return exact.to(_EIGHT_BITS[output_dtype]).view(torch.uint8).numpy()
    if input_dtype in _EIGHT_BITS and output_dtype in _WIDER:
        stored = torch.from_numpy(numpy.array(data, dtype=numpy.uint8)).view(_EIGHT_BITS[input_dtype])
        wide = stored.to(_WIDER[output_dtype])
        bits = torch.int32 if wide.itemsize == 4 else torch.int16
        return wide.view(bits).numpy().view(f"uint{8 * wide.itemsize}")
    if (input_dtype, output_dtype) != (tl.float32, tl.bfloat16):
        return _convert_float(data, input_dtype, output_dtype, rounding_mode)
    bits = numpy.ascontiguousarray(data, dtype=numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(numpy.isnan(data), 0x7FC0, rounded).astype(numpy.uint16)


interpreter._patch_lang_tensor = _patch_with_index
interpreter._convert_float = _convert_to_nearest


_make_block_type = tl.block_type.__init__


@functools.cache
def _block_shape(lengths):
    block = tl.block_type.__new__(tl.block_type)
    _make_block_type(block, tl.int8, list(lengths))
    return block.shape, block.numel, str(block.shape)


@functools.cache
def _tensor_shape(lengths):
    return tl.constexpr(math.prod(lengths)), tl.core.tuple([tl.constexpr(n) for n in lengths])


def _block_type_of_known_shape(self, element_ty, shape):
    self.element_ty = element_ty
    self.shape, self.numel, text = _block_shape(tuple(shape))
    self.name = f"<{text}, {element_ty}>"


def _tensor_of_known_shape(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _tensor_shape(tuple(type.shape) if type.is_block() else ())


_get_np_dtype = interpreter._get_np_dtype
_numpy_types: dict[str, numpy.dtype] = {}  # by name: types of pointers and blocks have no hash


def _numpy_type(type):
    scalar = type.scalar
    found = _numpy_types.get(scalar.name)
    if found is None:
        found = _numpy_types[scalar.name] = _get_np_dtype(scalar)
    return found


tl.block_type.__init__ = _block_type_of_known_shape
tl.tensor.__init__ = _tensor_of_known_shape
interpreter._get_np_dtype = _numpy_type


_patch_lang = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_one_at_a_time = threading.RLock()
_patched_for: set[int] = set()  # globals of the files whose functions were called in this launch


def _patch_once(function):
    if id(function.__globals__) in _patched_for:
        return interpreter._LangPatchScope()
    _patched_for.add(id(function.__globals__))
    return _patch_lang(function)


def _launch_alone(self, *args, **kwargs):
    with _one_at_a_time:
        _patched_for.clear()  # a launch that ends restores what it replaced
        return _launch(self, *args, **kwargs)


interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_alone
