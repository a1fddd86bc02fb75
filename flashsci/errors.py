"""Errors that users meet; of the package's modules this one imports none."""

from __future__ import annotations


class BackendError(RuntimeError):
    """No backend, or not the one asked for, can serve the call; the message says why and what else
    can."""
