"""`python -m flashsci bench` with builds of single units among its candidates: any number of them, interleaved launch by launch with each other
and with peers, each checked against fp64 first. Needs a GPU.

    python -m tools.time_builds base=base.so new=new.so@64+128 --case dense-bf16-d64-full-s4096 --peers sdpa:cudnn,fa3
    python -m tools.time_builds new=new.so det=new.so sm80=new.so --suite bias --peers triton,sdpa:efficient
    python -m tools.time_builds new=new.so --suite bias --no-bias-grad --json new.json

Whole libraries (make build-manual) need none of this: bench --base takes the folder of another tree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

from tools.launchers import install


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", metavar="name=path[@dims]")
    parser.add_argument("--suite", default="", help="of bench; comma-separated")
    parser.add_argument("--case", default="", help="of bench; comma-separated")
    parser.add_argument("--peers", default="sdpa:cudnn", help="of bench's candidates; comma-separated")  # fmt: skip
    parser.add_argument("--dtype", default="", help="instead of that of the cases")
    parser.add_argument("--order", type=int, default=1, help="0: the forward alone")
    parser.add_argument("--no-bias-grad", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5, help="a case and pass")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    builds = [install(given).name for given in options.builds]
    from flashsci import bench  # now: its candidates are the backends that there are

    listed = lambda text: [item for item in text.split(",") if item]  # noqa: E731
    cases = bench.select(listed(options.suite) or ([] if options.case else ["dense"]), listed(options.case))  # fmt: skip
    if options.dtype:
        cases = [bench.in_dtype(case, options.dtype) for case in cases]
    if options.no_bias_grad:
        cases = [replace(case, bias_grad=False) for case in cases]
    leads: list[float] = []
    seen = 0

    def show(records: list[dict]) -> None:
        """The passes of the case that was measured last."""
        nonlocal seen
        for kind, group in itertools.groupby(records[seen:], lambda r: r["pass"]):
            found = {r["backend"]: r for r in group}
            times = {n: r["time_us"]["median"] for n, r in found.items() if r["time_us"]}
            cells = [
                f"{n} {times[n]:.1f} us {r['tflops'] or 0:.0f} TF" if n in times else f"{n} {r['gate'][:90]}"
                for n, r in found.items()
            ]  # fmt: skip
            mine, theirs = ([t for n, t in times.items() if (n in builds) == own] for own in (True, False))  # fmt: skip
            if mine and theirs:
                leads.append(min(theirs) / min(mine))
                cells.append(f"best of peers / best {leads[-1]:.3f}")
            print(records[-1]["case"]["id"], kind, *cells, sep=" | ", flush=True)
        seen = len(records)

    records = bench.run(
        cases,
        [*builds, *listed(options.peers)],
        "cuda",
        order=options.order,
        seconds=options.seconds,
        check=not options.no_check,
        on_case=show,
    )
    if leads:
        print(f"geomean {statistics.geometric_mean(leads):.3f}, least {min(leads):.3f}")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
