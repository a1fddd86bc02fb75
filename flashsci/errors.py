"""Errors that users meet. This module imports no other module of the package."""

from __future__ import annotations


class BackendError(RuntimeError):
    """No backend can serve the call, or the one asked for cannot; the message says why and which backends can."""
