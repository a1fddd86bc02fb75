"""Tables of modules that were imported when they were needed, for functions that a compiler traces."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class Loaded(Generic[Entry]):
    """Imported modules or ops, by name. A compiler sees entries that a decision adds during its trace: it keeps the
    keys of a dict that it has read, and reads attributes anew."""

    def __init__(self, **entries: Entry) -> None:
        self.__dict__.update(entries)

    def __getitem__(self, name: str) -> Entry:
        found: Entry = getattr(self, name)
        return found

    def __setitem__(self, name: str, entry: Entry) -> None:
        setattr(self, name, entry)

    def __delitem__(self, name: str) -> None:
        delattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def get(self, name: str, default: Any = None) -> Any:
        """The entry, or ``default``."""
        return self.__dict__.get(name, default)

    def copy(self) -> Loaded[Entry]:
        """Another table with the same entries."""
        return Loaded(**self.__dict__)
