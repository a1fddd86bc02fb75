"""The files that flashsci keeps on a machine: their folder, and writes that processes may make at the same time.

It imports only the standard library, so that `python -m flashsci env` can say where the files are.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: The environment variable with the folder of these files.
FOLDER = "FLASHSCI_CACHE"


def folder() -> Path:
    """The folder that ``FLASHSCI_CACHE`` names; else ``flashsci`` in the user's cache folder."""
    own = os.environ.get(FOLDER)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashsci"


def tuned() -> Path:
    """The file of the times of `flashsci.tune`."""
    return folder() / "tuned.json"


def entries(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def update(path: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the entries of a file by ``changed(entries)``. Processes take turns; readers see whole files only.

    A file that cannot be read counts as empty.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _turn(path):
        try:
            before = entries(path)
        except ValueError:
            before = {}
        number, part = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(changed(before), file, indent=1)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """A turn among the processes that write a file, where the system has such locks."""
    try:
        import fcntl
    except ImportError:  # Windows: the last of two writers at the same moment wins
        yield
        return
    with open(path.with_suffix(".lock"), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
