"""Every cell of the matrix is right, or refused with advice; and every tensor argument has its row."""

from __future__ import annotations

import inspect
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flashsci

from . import __main__, entries, oracle
from .cells import FLOAT32, judge
from .entries import ENTRIES, tensor_arguments
from .oracle import along
from .outcomes import BAD, RAW, REFUSED, RIGHT, WRONG, outcome_of
from .table import ALWAYS, FULL, OWN, SLOW, cells, device

pytest.importorskip("triton")
EVERYTHING = device() == "cuda" or bool(os.environ.get("FLASHSCI_WHOLE_MATRIX"))
CELLS = [
    pytest.param(cell, id=str(cell), marks=() if cell.when == ALWAYS else pytest.mark.slow)
    for cell in cells()
    if EVERYTHING or cell.when != FULL
]


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays():
    import torch.distributed as dist

    yield
    entries.MESHES.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", CELLS)
def test_cell(cell):
    outcome = cell.outcome()
    if outcome.kind in BAD:
        pytest.fail(f"{cell}: {outcome.kind}: {outcome.why}", pytrace=False)


def public_functions():
    """Those that compute something of tensors; ``explain`` only reads their shapes."""
    import flashsci.distributed as fd

    functions = [getattr(module, name) for module in (flashsci, fd) for name in module.__all__]
    return [f for f in functions if inspect.isfunction(f) and f is not flashsci.explain and tensor_arguments(f)]


@pytest.mark.parametrize("function", public_functions(), ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_every_tensor_argument_is_described(function):
    """A new argument, or a new function, needs a row in entries.py."""
    described = {n for entry in ENTRIES.values() if entry.function is function for n in (*entry.needed, *entry.others)}
    assert described == tensor_arguments(function)


@pytest.mark.parametrize("entry", OWN, ids=lambda e: e.name)
def test_entries_describe_their_function(entry):
    here = {*entry.needed, *entry.others}
    assert here.isdisjoint(entry.elsewhere)
    assert here | {*entry.elsewhere} == tensor_arguments(entry.function)


FLOATS = [(e.name, row) for e in OWN if e.derivatives for row in e.rows]


@pytest.mark.parametrize(("name", "row"), FLOATS)
def test_the_oracle_agrees_with_differences(name, row):
    """Derivatives of the formulas, which every cell is judged by, against differences of their values."""
    point = oracle.where(name, row)
    if not point.is_floating_point():
        pytest.skip("no tensor of numbers")
    formula, exact, step = (
        oracle.Differentiated(ENTRIES[name], row, None),
        oracle.exact(name, row, None),
        1e-3,
    )
    ts = [along(point.float(), n) for n in (0, 1)]

    def differences(f, t):
        moved = [f(point + n * step * t.reshape(point.shape)).double() for n in (-2, -1, 1, 2)]
        return (moved[0] - 8 * moved[1] + 8 * moved[2] - moved[3]) / (12 * step)

    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(oracle.loss(formula(x)) + 0 * x.sum(), x)[0].reshape(-1)

    def close(found, expected):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    close(exact.pushed, differences(lambda x: oracle.flat(formula(x)), ts[0]))
    cotangents = torch.cat([along(r.float()) for r in formula(point)])
    close(exact.pulled @ ts[0], cotangents @ exact.pushed)
    for n, t in enumerate(ts):
        close(exact.projected @ t, differences(lambda x: oracle.projected(formula(x)), t))
        close(exact.gradient @ t, differences(lambda x: oracle.loss(formula(x)), t))
        close(exact.curvatures[n], differences(slope, t))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x * 0,
        lambda x: x * 1.01,
        lambda x: x.flip(-1),
        lambda x: x / 0,
        lambda x: x[0],
        lambda x: None,
    ],
)
def test_judged_wrong(spoil):
    right = torch.randn(3, 4, dtype=torch.float64)
    assert judge([(right.float(), right)], FLOAT32).kind == RIGHT
    assert judge([(right, right), (spoil(right), right)], FLOAT32).kind == WRONG


def _raised(function):
    try:
        function()
    except Exception as error:
        return outcome_of(error).kind
    raise AssertionError("nothing was raised")


def test_errors_without_advice_are_raw():
    q = torch.randn(2, 4, 8)
    assert _raised(lambda: flashsci.attention(q, q, q, alibi_slopes=torch.ones(2), backend="sdpa")) == REFUSED
    assert _raised(lambda: q @ q) == RAW
    assert _raised(lambda: torch.vmap(lambda x: x.item())(q)) == RAW


@pytest.mark.parametrize(
    "quoted", ['("{}")', '([ConstantVariable(str: "{}")])', '((Lazy(realized: ConstantVariable(str: "{}")),))']
)
@pytest.mark.parametrize("words, kind", [("it has no alibi; use backend='triton'", REFUSED), ("it has no alibi", RAW)])
def test_a_compiler_repeats_a_refusal(quoted, words, kind):
    told = (
        f"Observed exception\n context: raised exception BackendError{quoted.format(words)}\n\n For more details, visit"
    )
    assert outcome_of(RuntimeError(told)).kind == kind


def test_all_threads_get_the_same_tensors(monkeypatch):
    """They are drawn from torch's one generator, by whoever asks first."""
    expected = entries.made("attention")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            monkeypatch.setattr(entries, "MADE", {})
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(entries.made, ["attention"] * 8))
            assert all(x is found[0] for x in found)
            assert all(torch.equal(x, expected[n]) for n, x in found[0].items())
    finally:
        sys.setswitchinterval(before)


def test_tensors_have_derivatives_whoever_asks_first(monkeypatch):
    monkeypatch.setattr(entries, "MADE", {})
    with torch.inference_mode():
        made = entries.made("attention_backward")
    assert not any(x.is_inference() for x in made.values())


@pytest.mark.parametrize("kinds, status", [((RIGHT, REFUSED), 0), ((RIGHT, WRONG), 1), ((), 1)])
def test_the_exit_status_tells_of_bad_cells(tmp_path, monkeypatch, kinds, status):
    kept = tmp_path / "cells.json"
    lines = [json.dumps(["merge", "outs", str(n), "auto", kind, "", 0.1]) for n, kind in enumerate(kinds)]
    kept.write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["tests.machinery", "--read", str(kept)])
    assert __main__.main() == status


def test_some_of_everything_is_always_run():
    """The sample of cells leaves out no tensor, no machinery and no backend."""
    always = [cell for cell in cells("cpu") if cell.when == ALWAYS]
    assert {(c.call.name, c.call.row) for c in always} == {(e.name, row) for e in OWN for row in e.rows}
    sampled = {c.machinery.name for c in cells("cpu") if c.when in (ALWAYS, SLOW)}
    assert sampled == {c.machinery.name for c in cells("cpu")}
