"""The parts that the command lines of the package and of tools/ share."""

from __future__ import annotations

import sys

import typer
from rich.console import Console


def wide_console() -> Console:
    """A console that is wide where there is no terminal: tables in log files should not wrap."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def run(commands: typer.Typer, arguments: list[str]) -> int:
    """Run one command of an application; returns the exit status."""
    try:
        commands(args=arguments, prog_name="python -m flashsci")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
