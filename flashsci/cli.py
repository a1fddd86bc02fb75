"""The command line: `backends`, `check`, `tune`, `bench`, `models`, `report`, `env`. (`env` also runs without this module
where packages are missing: flashsci/env.py.)"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from flashsci import limits
from flashsci.call.problem import Problem
from flashsci.choice import tuning
from flashsci.choice.backends import BACKENDS
from flashsci.console import run, wide_console

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

#: The rows of the support matrix: the features of a call, each with the smallest call that has it.
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
    "softcap of biased scores": replace(_PLAIN, **_PAIR, softcap=30.0, caps_bias=True),
    "mask": replace(_PLAIN, mask=True),
    "bias": replace(_PLAIN, **_PAIR),
    "gradient of the bias": replace(_PLAIN, **_PAIR, bias_grad=True, requires_grad=True),
    "key weights (fp32)": replace(_PLAIN, dtype=torch.float32, key_weight=True),
    "gradient of the key weights": replace(_PLAIN, key_weight=True, key_weight_grad=True, requires_grad=True),
    "key weights (fp32), up to 32 keys": replace(_PLAIN, dtype=torch.float32, seq_q=32, seq_k=32, key_weight=True),
    "ALiBi": replace(_PLAIN, alibi=True, requires_grad=True),
    "gradient of ALiBi slopes": replace(_PLAIN, alibi=True, alibi_grad=True, requires_grad=True),
    "attention sinks": replace(_PLAIN, sink=True, requires_grad=True),
    "gate of pairs": replace(_PLAIN, given=("q", "k", "v", "pair_gate")),
    "packed sequences": _PACKED,
    "packed, with ragged bias": replace(_PACKED, **{**_PAIR, "bias_shape": (4, 1 << 14)}, ragged_bias=True),
    "paged KV cache": replace(_PACKED, varlen=False, paged=True, cache_dtype=torch.float16),
    "float8_e4m3fn forward": replace(_PLAIN, dtype=torch.float8_e4m3fn),
    "dropout": replace(_PLAIN, dropout_p=0.1),
    "deterministic backward": replace(_PLAIN, deterministic=True, requires_grad=True),
}


def support(capability: tuple[int, int] | None, hypothetical: bool) -> dict[str, dict[str, str | None]]:
    """{feature: {backend: reason why not, or None}} for a GPU of that capability, or for the CPU (None).

    `hypothetical` asks for the coverage of the kernels, whether or not this machine could run them.
    """
    device = "cpu" if capability is None else "cuda"
    matrix = {}
    for feature, problem in FEATURES.items():
        problem = replace(problem, device_type=device, capability=capability)
        matrix[feature] = {name: backend.rejects(problem, anywhere=hypothetical) for name, backend in BACKENDS.items()}
    # Fused backends use Triton's kernels, with the tensors that they saved.
    matrix["second derivatives"] = {
        name: matrix["backward"][name] or (matrix["backward"]["triton"] if backend.load().FUSED else None)
        for name, backend in BACKENDS.items()
    }
    return matrix


#: The GPUs of docs/results/features.md: compute capabilities by name.
_GENERATIONS = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_90": (9, 0)}


def features_page() -> str:
    """The page docs/results/features.md: the features of every backend on each generation, and why not."""
    by_generation = {name: support(c, hypothetical=True) for name, c in _GENERATIONS.items()}
    first, *_, last = by_generation
    lines = [
        "# Features",
        "",
        "`python -m flashsci backends --write` writes this page. Each row is the smallest call that asks for a feature, in",
        "fp16 at head dim 64 unless the row says otherwise. The answers are those of the backends for GPUs of compute",
        f"capability {', '.join('.'.join(map(str, c)) for c in _GENERATIONS.values())}. "
        "`python -m flashsci backends` answers for the machine at hand.",
        "",
        "| " + " | ".join(["feature", *BACKENDS]) + " |",
        "|---" * (len(BACKENDS) + 1) + "|",
    ]
    for feature in by_generation[first]:
        if feature == "second derivatives":  # others use Triton's
            lines.append(f"| {feature} | " + " | ".join(map(_second_order, BACKENDS)) + " |")
            continue
        cells = [
            _where([name for name, m in by_generation.items() if m[feature][backend] is None]) for backend in BACKENDS
        ]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    lines += ["", f"## Why not, on {last}", "", "| feature | backend | reason |", "|---|---|---|"]
    for feature, answers in by_generation[last].items():
        lines += [
            f"| {feature} | {backend} | {reason.replace('|', chr(92) + '|')} |"
            for backend, reason in answers.items()
            if reason is not None
        ]
    return "\n".join(lines) + "\n"


def _second_order(name: str) -> str:
    module = BACKENDS[name].load()
    return "by triton" if module.FUSED and not hasattr(module, "double_backward") else "yes"


def _where(names: list[str]) -> str:
    """The generations of a cell: yes, no, or their names."""
    if len(names) in (0, len(_GENERATIONS)):
        return "yes" if names else "no"
    newest = list(_GENERATIONS)[-len(names) :]
    return f"from {names[0]}" if names == newest and len(names) > 1 else ", ".join(names)


@app.command()
def backends(
    arch: Annotated[str, typer.Option(help="Ask about a GPU that need not be here: 75, 80, 90, ... or 'cpu'.")] = "",
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
    write: Annotated[
        bool, typer.Option(help="In a clone: rewrite docs/results/features.md and docs/limits.md.")
    ] = False,
) -> None:
    """The coverage of each backend on this machine, with the reasons for gaps."""
    if write:
        from flashsci.digest import ROOT

        page = ROOT / "docs" / "results" / "features.md"
        if not page.parent.is_dir():
            raise typer.BadParameter(f"--write needs a clone of the repository: there is no {page.parent}")
        limits_page = ROOT / "docs" / "limits.md"
        for path, text in ((page, features_page()), (limits_page, limits.page())):
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
        return
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
            print(f"| {feature} | " + " | ".join("yes" if c == "yes" else "no" for c in cells) + " |")
        return
    console = wide_console()
    table = Table(title=f"flashsci on {where}", title_justify="left")
    table.add_column("feature (of fp16, D 64)")
    for name in BACKENDS:
        table.add_column(name, justify="center")
    for feature, *cells in rows:
        styled = ["[green]yes[/]" if c == "yes" else f"[dim]{c.replace('[', chr(92) + '[')}[/]" for c in cells]
        table.add_row(feature, *styled)
    console.print(table)
    for (name, reason), number in reasons.items():
        console.print(f"[{number}] {name}: {reason}", markup=False, highlight=False)


# Options, --help included, are those of the program that the command runs.
_PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


@app.command(context_settings=_PASSED_ON)
def check(context: typer.Context) -> None:
    """Run the correctness suite on this GPU and update reports/gpu-check.json."""
    from flashsci.check import main as run_check

    raise typer.Exit(run_check(context.args) or 0)


@app.command(context_settings=_PASSED_ON)
def bench(context: typer.Context) -> None:
    """Time flashsci against its peers, results checked first (in a clone of the repository)."""
    raise typer.Exit(_benchmarks(["bench", *context.args]))


@app.command(context_settings=_PASSED_ON)
def models(context: typer.Context) -> None:
    """Time whole models as they are and on flashsci (in a clone of the repository)."""
    raise typer.Exit(_benchmarks(["models", *context.args]))


@app.command(context_settings=_PASSED_ON)
def report(context: typer.Context) -> None:
    """Show benchmark records as tables and plots (in a clone of the repository)."""
    raise typer.Exit(_benchmarks(["report", *context.args]))


@app.command(context_settings={**_PASSED_ON, "allow_interspersed_args": False, "help_option_names": ["--help"]})
def tune(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python file; all that follows are its own arguments.")],
    verbose: Annotated[bool, typer.Option(help="Print a line for each kind of call when it has been timed.")] = False,
) -> None:
    """Run a script, and keep the fastest backend on this machine for each kind of call that it makes."""
    if not Path(script).is_file():
        raise typer.BadParameter(
            f"there is no file {script!r}; give a script: python -m flashsci tune train.py --epochs 1"
        )
    session = tuning.Session(verbose)
    sys.argv = [script, *context.args]
    sys.path[0] = str(Path(script).resolve().parent)
    tuning.start(session)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        tuning.stop(session)
        tuning.report(session)


@app.command(context_settings=_PASSED_ON)
def env(context: typer.Context) -> None:
    """The software on this machine, the missing parts, and how to get them; works without torch and typer."""
    from flashsci.env import main as run_env

    raise typer.Exit(run_env(context.args))


def _benchmarks(arguments: list[str]) -> int:
    """Run a command of tools/bench, a package of the repository that wheels do not contain."""
    from flashsci.digest import ROOT

    if not (ROOT / "tools" / "bench" / "commands.py").is_file():
        print(
            f"flashsci: `{arguments[0]}` is not part of the installed package (it is in {ROOT}): cases, peers and\n"
            "results are in tools/bench of the repository. Clone it, and run the same command in its folder.",
            file=sys.stderr,
        )
        return 2
    if str(ROOT) not in sys.path[:1]:  # before any other package of that name
        sys.path.insert(0, str(ROOT))
    from tools.bench.commands import main as run_command

    return run_command(arguments)


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    return run(app, arguments)
