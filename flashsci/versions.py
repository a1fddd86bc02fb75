"""The releases of torch and Triton that the tests run under. This module imports the standard library alone."""

from __future__ import annotations

import re
import warnings

#: Pairs of torch and Triton: each torch with the Triton that it brings, and the newest Triton ahead of torch.
TESTED = (
    ("2.10.0", "3.6.0"),
    ("2.11.0", "3.6.0"),
    ("2.12.1", "3.7.1"),
    ("2.13.0", "3.7.1"),
    ("2.14.1", "3.8.0"),
    ("2.14.1", "3.9.0"),
)


def series(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 14) of "2.14.1+cu130"."""
    first, second = re.findall(r"\d+", version)[:2]
    return int(first), int(second)


NEWEST = {
    "torch": max(series(torch) for torch, _ in TESTED),
    "triton": max(series(triton) for _, triton in TESTED),
}


def newer(name: str, version: str) -> str | None:
    """A word about a release that is newer than every tested one; None of others."""
    newest = ".".join(map(str, NEWEST[name]))
    if series(version) <= NEWEST[name]:
        return None
    return f"{name} {version} is newer than flashsci is tested with (to {newest}); look for a newer flashsci"


def warn_if_newer(name: str, version: str) -> None:
    if word := newer(name, version):
        warnings.warn(word, UserWarning, stacklevel=3)
