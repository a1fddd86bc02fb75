"""`python -m flashsci bench`, `models` and `report`: the command line over this package."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashsci import records as records_file
from flashsci.console import run, wide_console
from tools import bench as core

ROOT = Path(__file__).resolve().parents[2]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _save(records: list[dict], path: Path | None) -> None:
    """Called after every case or model: a run that is cut short leaves a file."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        records_file.write(path, records)


def _say(records: list[dict], console: Console) -> None:
    """One line for each case and pass, for terminals without a progress bar."""
    if console.is_terminal:
        return
    lines: dict[tuple[str, str], list[str]] = {}
    for record in records:
        found = record["time_us"]
        what = f"{found['median']:.1f} us" if found else record["gate"].split(":")[0]
        lines.setdefault((record["case"]["id"], record["pass"]), []).append(f"{record['backend']} {what}")
    for (case, kind), parts in lines.items():
        print(f"{case} {kind}: {', '.join(parts)}", flush=True)


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="Comma-separated: headline, dense, dense-fp32, bias, tiny, varlen, order2, decode, "
            "latency, calls, dense-short, wide, auto, all, cpu; or drawn: calls drawn at random, which has "
            "--seed, --calls, --first and --small, of the other options --seconds, --device and --json, and prints "
            "the regret of auto."
        ),
    ] = "",
    case: Annotated[str, typer.Option(help="Comma-separated ids of single cases.")] = "",
    backends: Annotated[
        str,
        typer.Option(
            help="Comma-separated: triton, cuda, sdpa:flash, ..., math, flex, fa3, cueq, turbo, or "
            "ours, baselines, choices (of auto)."
        ),
    ] = "",
    order: Annotated[int, typer.Option(help="Highest derivative to time: 0 forward, 1 backward too.")] = 1,
    dtype: Annotated[str, typer.Option(help="Run the cases in this dtype instead: bf16, fp16, fp32.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the GPU if there is one.")] = "",
    seconds: Annotated[
        float | None,
        typer.Option(help="Measuring time per case and pass, about (1); of drawn: the time of the whole run (240)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="drawn: the seed of the calls.")] = 1,
    calls: Annotated[int, typer.Option(help="drawn: the most calls, whatever the time.")] = 10**6,
    first: Annotated[int, typer.Option(help="drawn: the number of the first call.")] = 0,
    small: Annotated[
        bool | None, typer.Option("--small/--large", help="drawn: the size of the calls; default: small on a CPU.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A fifth of the time; for a first look.")] = False,
    check: Annotated[bool, typer.Option(help="Compare with fp64 first; no speed without it.")] = True,
    base: Annotated[
        str,
        typer.Option(help="Another revision, by git's name or as a folder: ours run twice, interleaved."),
    ] = "",
    minutes: Annotated[float, typer.Option(help="Begin no case after these; the table comes all the same.")] = math.inf,
    fa3: Annotated[
        str,
        typer.Option(envvar="FLASHSCI_FA3", help="FlashAttention-3's library, for the peer fa3."),
    ] = "",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the records here; of drawn: one a line, as they come.")
    ] = None,
) -> None:
    """Time flashsci against its peers, interleaved launch by launch, after checking the results."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if fa3:
        os.environ["FLASHSCI_FA3"] = fa3

    if suite == "drawn":
        _drawn(seed, 240.0 if seconds is None else seconds, where, calls, first, small, json_path)
        return
    seconds = 1.0 if seconds is None else seconds
    suites = _listed(suite) or ([] if case else ["headline" if where.type == "cuda" else "cpu"])
    console = wide_console()
    progress = _progress(console)

    found: list[dict] = []

    def save(records: list[dict]) -> None:
        progress.advance(task)
        _save(records, json_path)
        _say(records[len(found) :], console)
        found[:] = records

    start = time.monotonic()
    try:
        cases = core.select(suites, _listed(case))
        if dtype:
            cases = [core.in_dtype(c, dtype) for c in cases]
        core.names_of(_listed(backends), where)
        with progress:
            task = progress.add_task("", total=len(cases))
            if where.type == "cuda":
                core.compile_ahead(
                    cases,
                    _listed(backends),
                    where,
                    order,
                    base or None,
                    on_step=lambda text: progress.update(task, description=text),
                )
            core.run(
                cases,
                _listed(backends),
                where,
                order=order,
                seconds=seconds / 5 if quick else seconds,
                check=check,
                base=base or None,
                minutes=minutes - (time.monotonic() - start) / 60,
                on_step=lambda text: progress.update(task, description=text),
                on_case=save,
            )
    except core.BenchError as error:
        raise typer.BadParameter(str(error)) from error
    finally:  # also after a run that breaks off
        if found:
            core.show(core.tables(found), console)
    if json_path:
        console.print(f"wrote {len(found)} records to {json_path}")


def _drawn(
    seed: int, seconds: float, device: torch.device, calls: int, first: int, small: bool | None, path: Path | None
) -> None:
    from tools.bench import drawn

    console = wide_console()
    records: list[dict] = []

    def say(record: dict) -> None:
        records.append(record)
        if not console.is_terminal:
            auto = record["candidates"].get("auto", {})
            ran = ", ".join(filter(None, auto.get("by", ())))
            print(f"{record['text']}: auto {auto.get('loop_us', '-')} us, {ran or auto.get('gate')}", flush=True)

    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("")
            drawn.run(
                seed,
                seconds,
                device=device,
                calls=calls,
                first=first,
                small=small,
                path=path,
                on_step=lambda text: progress.update(task, description=text),
                on_record=say,
            )
    finally:  # also after a run that breaks off
        if records:
            text = drawn.summary(records)
            print(text, flush=True)
            if path:
                path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    if path:
        console.print(f"wrote {len(records)} records to {path}")


@app.command()
def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="pet, boltz, protenix, unimol, esmc, tabpfn, vit, swin; default: all."),
    ] = None,
    size: Annotated[str, typer.Option(help="tiny or real; default: real on a GPU, tiny on a CPU.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp32; default: each that a model runs in.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the GPU if there is one.")] = "",
    seconds: Annotated[float, typer.Option(help="Measuring time per step and clock, about.")] = 1.0,
    minutes: Annotated[
        float, typer.Option(help="Begin no model after these; the table comes all the same.")
    ] = math.inf,
    compiled: Annotated[bool, typer.Option(help="Both ways by torch.compile, too: a minute for each.")] = False,
    clients: Annotated[
        Path | None,
        typer.Option(
            envvar="FLASHSCI_CLIENTS",
            file_okay=False,
            help="The folder that `python -m tools.models get FOLDER` filled; default: build/clients.",
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the records here.")] = None,
) -> None:
    """Time whole models as their clients run them, and with their attention on flashsci."""
    from tools.models import MODELS, measure
    from tools.models.clients import prepare

    console = wide_console()
    prepare(clients)
    names = names or list(MODELS)

    records: list[dict] = []

    def save(found: list[dict]) -> None:
        progress.advance(task)
        _save(found, json_path)
        _say(found[len(records) :], console)
        records[:] = found

    try:
        with _progress(console) as progress:
            task = progress.add_task("", total=len(names))
            measure.run(
                names,
                size=size or None,
                dtype=dtype or None,
                device=device or None,
                seconds=seconds,
                minutes=minutes,
                compiled=compiled,
                on_step=lambda text: progress.update(task, description=text),
                on_model=save,
            )
    except core.BenchError as error:
        raise typer.BadParameter(str(error)) from error
    finally:  # also after a run that breaks off
        if records:
            core.show(core.tables(records), console)
    if json_path:
        console.print(f"wrote {len(records)} records to {json_path}")
    failed = [r for r in records if r["gate"].startswith("failed")]
    if failed:
        raise typer.Exit(1)


@app.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="What `bench --json` wrote; default: all in reports/bench but drawn calls (.jsonl).",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
    compare: Annotated[bool, typer.Option(help="Two files, OLD and NEW: what changed between them.")] = False,
    merge: Annotated[
        bool,
        typer.Option(help="Write into the first file what the others have measured again."),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(help="Draw speed, error and standings as PNG files in this folder."),
    ] = None,
    write: Annotated[bool, typer.Option(help="Rewrite the tables between markers in README.md and docs/.")] = False,
) -> None:
    """Show records of earlier benchmarks: as tables, plots, and in the documentation."""
    console = wide_console()
    of_draws = [path for path in files or () if path.suffix == ".jsonl"]
    if of_draws:
        if len(of_draws) != len(files or ()):
            raise typer.BadParameter("records of drawn calls (.jsonl) are reported alone, not with others")
        from tools.bench import drawn

        print(drawn.summary([record for path in of_draws for record in drawn.read(path)]))
        return
    files = files or sorted(ROOT.glob("reports/bench/*/*.json"))
    if not files:
        raise typer.BadParameter("no files given, and none in reports/bench")
    read = [json.loads(path.read_text()) for path in files]
    if merge:
        if compare:
            raise typer.BadParameter("--merge and --compare do not go together: compare first")
        if len(files) < 2:
            raise typer.BadParameter("--merge takes OLD and what was measured since")
        for newer in read[1:]:
            read[0] = core.merged(read[0], newer)
        _save(read[0], files[0])
        read = read[:1]
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
        from tools.bench.plots import draw

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
    """Run `bench ...`, `models ...` or `report ...`; returns the exit status."""
    os.environ.setdefault("FLASHSCI_TUNE", "0")  # records say what the rules choose, not what this machine was tuned to
    return run(app, arguments)
