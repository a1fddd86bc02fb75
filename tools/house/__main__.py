"""Counts of this repository about itself, as a Markdown table.

    python -m tools.house                    the working tree
    python -m tools.house --base REVISION    beside another revision, and only the rows that differ with --changed
    python -m tools.house --option scale     the files that another option touches

The text of a revision is counted by tools/house/counts.py. The way of a call is counted by tools/house/trace.py, which
runs in a process of its own on the interpreted Triton backend; no GPU is needed. `--base` checks the other revision
out into a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.house.counts import Tree, counts

ROOT = Path(__file__).resolve().parents[2]
TRACE = Path(__file__).with_name("trace.py")


def git(*words: str, root: Path = ROOT) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


def tree(root: Path) -> Tree:
    """The files of a checkout that git tracks or would track, as text; those that are no text are left out."""
    found = {}
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", root=root)
    for name in sorted(set(names.split("\0")) - {""}):
        path = root / name
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(UnicodeDecodeError):
                found[name] = path.read_text(encoding="utf-8")
    return found


def way_of_a_call(root: Path) -> dict[str, str]:
    """Python frames and files from `attention` to the launch, of the first, second and third call."""
    environment = os.environ | {"PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(TRACE)], cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{TRACE.name} failed on {root}:\n{done.stderr}")
    found: dict[str, list[tuple[int, int]]] = {}
    for call, (frames, files) in json.loads(done.stdout).items():
        found.setdefault(call.rpartition(", ")[0], []).append((frames, files))
    return {
        f"frames (files) to the launch, calls 1, 2, 3: {call}": ", ".join(
            f"{frames} ({files})" for frames, files in numbers
        )
        for call, numbers in found.items()
    }


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A temporary checkout of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(root), revision)
        try:
            yield root
        finally:
            git("worktree", "remove", "--force", str(root))


def measured(root: Path, option: str, trace: bool) -> dict[str, str]:
    return counts(tree(root), option) | (way_of_a_call(root) if trace else {})


def table(columns: dict[str, dict[str, str]], changed: bool) -> str:
    """A Markdown table: a row for each count, a column for each revision; rows in the order of the last one."""
    rows = list(dict.fromkeys(row for column in reversed(columns.values()) for row in column))
    lines = [["count", *columns], ["---", *("---:" for _ in columns)]]
    for row in rows:
        cells = [column.get(row, "-") for column in columns.values()]
        if not changed or len(set(cells)) > 1:
            lines.append([row, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="REV", help="another revision, in a column of its own")
    parser.add_argument("--option", default="sink", help="the option whose files are counted")
    parser.add_argument("--changed", action="store_true", help="only the rows that differ")
    parser.add_argument("--no-trace", action="store_true", help="leave out the way of a call")
    given = parser.parse_args(arguments)
    if given.changed and not given.base:
        parser.error("--changed compares two revisions: give the other one with --base REV")
    columns = {}
    if given.base:
        with checkout(given.base) as root:
            columns[given.base] = measured(root, given.option, not given.no_trace)
    columns["now"] = measured(ROOT, given.option, not given.no_trace)
    print(table(columns, given.changed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
