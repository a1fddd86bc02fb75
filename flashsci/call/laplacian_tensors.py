"""The tensors of a forward Laplacian, declared once: see flashsci/api/laplacian.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashsci.call import kinds


class LaplacianTensors(NamedTuple):
    """The tensors of one call, with the same leading dims: rows [*, H, S, D], Jacobians [n, *, H, S, D]."""

    q: kinds.Rows
    k: kinds.Rows
    v: kinds.Rows
    q_jacobian: kinds.OptionalRows = None
    k_jacobian: kinds.OptionalRows = None
    v_jacobian: kinds.OptionalRows = None
    q_laplacian: kinds.OptionalRows = None
    k_laplacian: kinds.OptionalRows = None
    v_laplacian: kinds.OptionalRows = None
    bias: kinds.Bias = None
    mask: kinds.Mask = None

    @property
    def jacobians(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.q_jacobian, self.k_jacobian, self.v_jacobian

    @property
    def directions(self) -> int:
        """The number of coordinates; 0 without Jacobians."""
        return next((x.shape[0] for x in self.jacobians if x is not None), 0)
