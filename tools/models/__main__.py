"""`python -m tools.models get FOLDER`: the client code, for this machine or one without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.models import clients


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="get")
    get = commands.add_parser("get", help="download the clients' packages and unpack them")
    get.add_argument("folder", type=Path, nargs="?", default=clients.FOLDER)
    folder = parser.parse_args().folder
    found = [path.name for path in clients.get(folder) if path.suffix != ".dist-info"]
    print(f"{folder}: {', '.join(found)}")


if __name__ == "__main__":
    main()
