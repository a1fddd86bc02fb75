"""A bias or mask whose rows do not begin at multiples of 16 bytes: kernels get a copy, and its gradient comes back in
the shape and order of the bias."""

import pytest
import torch

import flashsci
from flashsci.call import row_pitch
from flashsci.call.ops import Tensors
from flashsci.testing.judge import judge
