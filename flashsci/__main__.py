"""`python -m flashsci COMMAND`. `env` needs only the standard library; the rest needs the `cli` extra."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["env"]:
        from flashsci import env

        return env.main(arguments[1:])
    try:
        from flashsci import cli
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("flashsci"):
            raise
        advice = {
            "torch": "pip install 'torch>=2.10'",
            "typer": "pip install 'flashsci[cli]'",
            "rich": "pip install 'flashsci[cli]'",
        }
        how = advice.get(error.name or "", f"pip install {error.name}")
        print(f"flashsci: {error.name} is not installed. To get it: {how}", file=sys.stderr)
        print("`python -m flashsci env` lists everything that is missing.", file=sys.stderr)
        return 1
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
