"""The command line: `backends`, `check`, `bench`, `report`. (`env` is in flashsci/env.py and needs
none of this.)"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashsci.problem import Problem
from flashsci.registry import BACKENDS

app = typer.Typer(
    help="Exact softmax attention for PyTorch: what runs here, is it right, how fast is it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PLAIN = Problem(
    device_type="cuda",
    capability=(9, 0),
    dtype=torch.float16,
    heads_q=4,
    heads_k=4,
    head_dim=64,
    head_dim_v=64,
    batch=(2,),
    seq_q=128,
    seq_k=128,
)
_PACKED = replace(_PLAIN, batch=None, varlen=True)
_PAIR: dict[str, Any] = {"bias_shape": (1, 4, 128, 128), "bias_dtype": torch.float32}

#: The rows of the support matrix: what a call may ask for, each as the smallest call that asks for
#: it.
FEATURES: dict[str, Problem] = {
    "forward": _PLAIN,
    "backward": replace(_PLAIN, requires_grad=True),
    "lse returned": replace(_PLAIN, return_lse=True),
    "bf16": replace(_PLAIN, dtype=torch.bfloat16),
    "fp32, at fp32 accuracy": replace(_PLAIN, dtype=torch.float32),
    "fp64": replace(_PLAIN, dtype=torch.float64),
    "grouped-query heads": replace(_PLAIN, heads_k=2),
    "head dim 24": replace(_PLAIN, head_dim=24, head_dim_v=24),
    "head dim 256": replace(_PLAIN, head_dim=256, head_dim_v=256),
    "D 128, Dv 64": replace(_PLAIN, head_dim=128),
    "causal": replace(_PLAIN, window_right=0),
    "causal, aligned lower right": replace(_PLAIN, window_right=0, lower_right=True),
    "sliding window": replace(_PLAIN, window_left=64, window_right=0),
    "softcap": replace(_PLAIN, softcap=30.0),
    "mask": replace(_PLAIN, mask=True),
    "bias": replace(_PLAIN, **_PAIR),
    "gradient of the bias": replace(_PLAIN, **_PAIR, bias_grad=True, requires_grad=True),
    "key weights (fp32)": replace(_PLAIN, dtype=torch.float32, key_weight=True),
    "gradient of the key weights": replace(
        _PLAIN, key_weight=True, key_weight_grad=True, requires_grad=True
    ),
    "packed sequences": _PACKED,
    "packed, with ragged bias": replace(
        _PACKED, **{**_PAIR, "bias_shape": (4, 1 << 14)}, ragged_bias=True
    ),
    "dropout": replace(_PLAIN, dropout_p=0.1),
    "deterministic backward": replace(_PLAIN, deterministic=True, requires_grad=True),
}


def support(
    capability: tuple[int, int] | None, hypothetical: bool
) -> dict[str, dict[str, str | None]]:
    """{feature: {backend: reason why not, or None}} for a GPU of that capability, or for the CPU
    (None).

    `hypothetical` asks what the kernels cover, whether or not this machine could run them.
    """
    device = "cpu" if capability is None else "cuda"
    matrix = {}
    for feature, problem in FEATURES.items():
        problem = replace(problem, device_type=device, capability=capability)
        matrix[feature] = {
            name: backend.rejects(problem, anywhere=hypothetical)
            for name, backend in BACKENDS.items()
        }
    # Fused backends have Triton's, from what they saved.
    matrix["second derivatives"] = {
        name: matrix["backward"][name]
        or (matrix["backward"]["triton"] if backend.load().FUSED else None)
        for name, backend in BACKENDS.items()
    }
    return matrix


def _console() -> Console:
    """Wide where there is no terminal to fit into: tables in log files should not wrap."""
    return Console() if sys.stdout.isatty() else Console(width=160)


@app.command()
def backends(
    arch: Annotated[
        str, typer.Option(help="Ask about a GPU that need not be here: 75, 80, 90, ... or 'cpu'.")
    ] = "",
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
) -> None:
    """Which backend covers what on this machine, and the reasons where it does not."""
    if arch and arch != "cpu" and not (arch.isdigit() and len(arch) >= 2):
        raise typer.BadParameter(f"{arch!r} is neither 'cpu' nor a number such as 75, 80 or 90")
    if arch:
        capability = None if arch == "cpu" else (int(arch[:-1]), int(arch[-1]))
        where = "CPU" if arch == "cpu" else f"sm_{arch}"
    elif torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        where = f"{torch.cuda.get_device_name()} (sm_{capability[0]}{capability[1]})"
    else:
        capability, where = None, "CPU (torch sees no GPU)"
    matrix = support(capability, hypothetical=bool(arch))
    reasons: dict[tuple[str, str], int] = {}
    rows = []
    for feature, answers in matrix.items():
        cells = [feature]
        for name, reason in answers.items():
            if reason is None:
                cells.append("yes")
            else:
                cells.append(f"no [{reasons.setdefault((name, reason), len(reasons) + 1)}]")
        rows.append(cells)
    if markdown:
        print("| " + " | ".join(["", *BACKENDS]) + " |")
        print("|---" * (len(BACKENDS) + 1) + "|")
        for feature, *cells in rows:
            print(
                f"| {feature} | " + " | ".join("yes" if c == "yes" else "no" for c in cells) + " |"
            )
        return
    console = _console()
    table = Table(title=f"flashsci on {where}", title_justify="left")
    table.add_column("feature (of fp16, D 64)")
    for name in BACKENDS:
        table.add_column(name, justify="center")
    for feature, *cells in rows:
        styled = [
            "[green]yes[/]" if c == "yes" else f"[dim]{c.replace('[', chr(92) + '[')}[/]"
            for c in cells
        ]
        table.add_row(feature, *styled)
    console.print(table)
    for (name, reason), number in reasons.items():
        console.print(f"[{number}] {name}: {reason}", markup=False, highlight=False)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # --help is the suite's own
    }
)
def check(context: typer.Context) -> None:
    """Run the correctness suite on this GPU and update reports/gpu-check.json."""
    from flashsci.check import main as run_check

    raise typer.Exit(run_check(context.args) or 0)


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="Comma-separated: headline, dense, dense-fp32, bias, tiny, varlen, order2, decode, "
            "latency, all, cpu."
        ),
    ] = "",
    case: Annotated[str, typer.Option(help="Comma-separated ids of single cases.")] = "",
    backends: Annotated[
        str,
        typer.Option(
            help="Comma-separated: triton, cuda, sdpa:flash, ..., flex, fa3, cueq, or ours, baselines."
        ),
    ] = "",
    order: Annotated[
        int, typer.Option(help="Highest derivative to time: 0 forward, 1 backward too.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="Run the cases in this dtype instead: bf16, fp16, fp32.")
    ] = "",
    device: Annotated[
        str, typer.Option(help="cuda or cpu; default: the GPU if there is one.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Measuring time per case and pass, about.")] = 1.0,
    quick: Annotated[bool, typer.Option(help="A fifth of the time; for a first look.")] = False,
    check: Annotated[
        bool, typer.Option(help="Compare with fp64 first; no speed without it.")
    ] = True,
    base: Annotated[
        str,
        typer.Option(
            help="Another revision, by git's name or as a folder: ours run twice, interleaved."
        ),
    ] = "",
    fa3: Annotated[
        str,
        typer.Option(envvar="FLASHSCI_FA3", help="FlashAttention-3's library, for the peer fa3."),
    ] = "",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the records here.")
    ] = None,
) -> None:
    """Time flashsci against its peers, interleaved launch by launch, after checking the results."""
    from flashsci import bench as core

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if fa3:
        os.environ["FLASHSCI_FA3"] = fa3

    def listed(text: str) -> list[str]:
        return [item.strip() for item in text.split(",") if item.strip()]

    suites = listed(suite) or ([] if case else ["headline" if where.type == "cuda" else "cpu"])
    console = _console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )

    def save(
        records: list[dict],
    ) -> None:  # after every case: a run that is cut short leaves a file
        progress.advance(task)
        if json_path:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(records, indent=1) + "\n")

    try:
        cases = core.select(suites, listed(case))
        if dtype:
            cases = [core.in_dtype(c, dtype) for c in cases]
        core.names_of(listed(backends), where)
        with progress:
            task = progress.add_task("", total=len(cases))
            if where.type == "cuda":
                core.compile_ahead(
                    cases,
                    listed(backends),
                    where,
                    order,
                    base or None,
                    on_step=lambda text: progress.update(task, description=text),
                )
            records = core.run(
                cases,
                listed(backends),
                where,
                order=order,
                seconds=seconds / 5 if quick else seconds,
                check=check,
                base=base or None,
                on_step=lambda text: progress.update(task, description=text),
                on_case=save,
            )
    except core.BenchError as error:
        raise typer.BadParameter(str(error)) from error
    core.show(core.tables(records), console)
    if json_path:
        console.print(f"wrote {len(records)} records to {json_path}")


@app.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="What `bench --json` wrote; default: all in benchmarks/.",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
    compare: Annotated[
        bool, typer.Option(help="Two files, OLD and NEW: what changed between them.")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(help="Draw speed, error and standings as PNG files in this folder."),
    ] = None,
    write: Annotated[
        bool, typer.Option(help="Rewrite the tables between markers in README.md and docs/.")
    ] = False,
) -> None:
    """Show records of earlier benchmarks: as tables, plots, and in the documentation."""
    from flashsci import bench as core
    from flashsci.digest import ROOT

    console = _console()
    files = files or sorted(ROOT.glob("benchmarks/results/*/*.json"))
    if not files:
        raise typer.BadParameter("no files given, and none in benchmarks/results")
    read = [json.loads(path.read_text()) for path in files]
    if compare:
        if len(files) != 2:
            raise typer.BadParameter(f"--compare takes two files, OLD and NEW, not {len(files)}")
        found = [core.comparison(*read)]
    else:
        found = core.tables([record for records in read for record in records])
    if markdown:
        print("\n\n".join(f"**{table.title}**\n\n{core.markdown(table)}" for table in found))
    else:
        core.show(found, console)
    if plots:
        from flashsci.bench.plots import draw

        for path in draw([record for records in read for record in records], plots):
            console.print(f"drew {path}")
    if write:
        try:
            changed = core.refresh(ROOT)
        except core.BenchError as error:
            raise typer.BadParameter(str(error)) from error
        for page in changed:
            console.print(f"rewrote the tables of {page.relative_to(ROOT)}")


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    try:
        app(args=arguments, prog_name="python -m flashsci")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
