"""`python -m flashsci bench` with builds of single units as candidates. Needs a GPU.

Any number of builds are interleaved launch by launch with each other and with peers, each checked against fp64
first.

    python -m tools.kernels.time_builds base=base.so new=new.so@64+128 --dims 64,96,192/128 --seqs 512,16384 --peers sdpa:cudnn,fa3
    python -m tools.kernels.time_builds new=new.so det=new.so sm80=new.so --suite bias,pairs --peers triton,sdpa:efficient
    python -m tools.kernels.time_builds new=new.so --case long-bias --no-bias-grad --json new.json

Cases: bench's, those of PAIRS (suite pairs), or the dense grid at any head dims. Whole libraries (make build-manual) need none of this:
bench --base takes the folder of another tree.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace
from pathlib import Path

from flashsci import records as records_file
from tools.kernels.launchers import install


def pairs():
    """Cases that distinguish the kernels with bias and mask, in addition to those of models."""
    from tools.bench import Case

    def case(name: str, b: int, h: int, s: int, d: int, bias=None, mask=None, dtype="bf16") -> Case:
        shape = lambda batch, heads, rows: (batch, heads, rows, s)  # noqa: E731
        return Case(f"pairs-{name}", "pairs", B=b, H=h, Sq=s, Sk=s, D=d, bias=bias and shape(*bias), bias_grad=bias is not None,
                    bias_dtype=dtype, mask=mask and shape(*mask))  # fmt: skip

    return [
        case("d24", 1, 16, 768, 24, bias=(1, 16, 768)),
        case("d32", 4, 16, 768, 32, bias=(4, 16, 768)),
        case("d128", 2, 16, 2048, 128, bias=(2, 16, 2048)),
        case("d64-fp32", 4, 16, 768, 64, bias=(4, 16, 768), dtype="fp32"),
        case("d128-fp32", 2, 16, 2048, 128, bias=(2, 16, 2048), dtype="fp32"),
        case("d32-shared", 256, 4, 256, 32, bias=(1, 4, 256)),
        case("d64-shared", 8, 16, 1024, 64, bias=(1, 16, 1024)),
        case("d128-shared", 8, 16, 1024, 128, bias=(1, 16, 1024)),
        case("d32-mask", 64, 16, 256, 32, mask=(64, 1, 256)),
        case("d64-mask", 4, 16, 2048, 64, mask=(4, 1, 2048)),
        case("d128-mask", 4, 16, 2048, 128, mask=(4, 1, 2048)),
        case("d64-fp32-mask", 4, 16, 768, 64, bias=(4, 16, 768), mask=(4, 1, 768), dtype="fp32"),
        case("d32-keys", 64, 16, 256, 32, mask=(64, 1, 1)),
        case("d64-keys", 4, 16, 2048, 64, mask=(4, 1, 1)),
        case("d128-keys", 4, 16, 2048, 128, mask=(4, 1, 1)),
    ]


def dense(dims: list[str], seqs: list[int]):
    """The grid of the dense suite at other head dims, too; "192/128": values of 128."""
    from tools.bench.cases import dense_grid

    return [
        replace(case, id=case.id.replace("-d64-", f"-d{given}-"), D=d, Dv=dv, H=2048 // d, Hk=2048 // d)
        for given in dims
        for d, dv in [[int(x) for x in (given.split("/") * 2)[:2]]]
        for case in dense_grid()
        if case.D == 64 and case.Sq in seqs
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="name=path[@dims]")
    parser.add_argument("--suite", default="", help="of bench, or pairs; comma-separated")
    parser.add_argument("--case", default="", help="ids; comma-separated")
    parser.add_argument("--dims", default="", help="the dense grid; the default: 64,128")
    parser.add_argument("--seqs", default="1024,4096,16384", help="lengths of the dense grid")
    parser.add_argument("--peers", default="sdpa:cudnn", help="of bench's candidates; comma-separated")
    parser.add_argument("--dtype", default="", help="instead of that of the cases")
    parser.add_argument("--order", type=int, default=1, help="0: the forward alone")
    parser.add_argument("--no-bias-grad", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5, help="a case and pass")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    builds = [install(given).name for given in options.builds]
    from tools import bench  # now: its candidates are the backends that exist

    listed = lambda text: [item for item in text.split(",") if item]  # noqa: E731
    bench.SUITES["pairs"] = pairs()
    bench.CASES.update((case.id, case) for case in bench.SUITES["pairs"])
    cases = bench.select(listed(options.suite), listed(options.case))
    dims = listed(options.dims) or ([] if cases else ["64", "128"])
    cases += dense(dims, [int(x) for x in listed(options.seqs)])
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
            ]
            mine, theirs = ([t for n, t in times.items() if (n in builds) == own] for own in (True, False))
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
        records_file.write(options.json, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
