"""What is read from records: standings, claims, comparisons, tables in pages, plots."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flashsci import cli
from tools import bench
from tools.bench import ranking, report

ROOT = Path(__file__).resolve().parents[3]


def record(case, kind, backend, us, gate="passed", **changes):
    host = kind.startswith("host")
    found = re.search(r"-s(\d+)$", case)
    return {
        "case": {"id": case, "D": 64, **({"Sk": int(found[1])} if found else {})},
        "suite": "dense",
        "pass": kind,
        "backend": backend,
        "commit": "abc1234",
        "dirty": False,
        "time_us": None if us is None else {"median": us, "p20": 0.99 * us, "p80": 1.01 * us, "min": 0.9 * us},
        "tflops": None if us is None or host else 1000 / us,
        "gbps": None if us is None or host else 100 / us,
        "pct_sol": None if us is None or host else 500 / us,
        "ceiling": None if host else {"tflops": 200.0, "gbps": 400.0},
        "peak_mem_mb": 1.0,
        "max_err": 1e-3,
        "err_ratio": 0.5,
        "gate": gate,
        "env": {"gpu": "NVIDIA H200", "host": "x86_64", "torch": "2.11"},
        **changes,
    }


RECORDS = [
    record("dense-bf16-d64-full-s1024", "forward", "triton", 12.0),
    record("dense-bf16-d64-full-s1024", "forward", "cuda", 10.0),
    record("dense-bf16-d64-full-s1024", "forward", "flex", 20.0),
    record("dense-bf16-d64-full-s1024", "forward", "fa3", 8.0),
    record("dense-bf16-d64-full-s1024", "forward", "sdpa:math", None, "refused: too large"),
    record("dense-bf16-d64-full-s4096", "forward", "triton", 100.0),
    record("dense-bf16-d64-full-s4096", "forward", "cuda", None, "failed: out: error 3 > 2"),
    record("dense-bf16-d64-full-s4096", "forward", "flex", 200.0),
    record("af3-pair", "backward", "triton", 50.0),
    record("af3-pair", "backward", "sdpa:default", 50.1),
    record("af3-pair", "backward", "sdpa:efficient", 50.2),
    record("af3-pair", "backward", "flex", None, "refused: no gradient"),
    record("msa-row", "forward", "triton", 50.0),
    record("escaip", "forward", "sdpa:math", 50.0),
]


def test_standings():
    found = {s.about["case"]["id"]: s for s in ranking.standings(RECORDS)}
    lost = found["dense-bf16-d64-full-s1024"]
    assert (lost.ours["backend"], lost.peer["backend"], lost.ratio) == ("cuda", "fa3", 0.8)
    assert lost.result == "loses"
    assert found["dense-bf16-d64-full-s4096"].result == "wins", "what failed its check is not ours"
    draw = found["af3-pair"]
    assert (draw.result, draw.peer["backend"]) == ("draws", "sdpa:efficient"), "default is no kernel"
    assert (found["msa-row"].result, found["msa-row"].ratio) == ("wins", None)
    assert (found["escaip"].result, found["escaip"].ours) == ("loses", None)


def test_standings_of_what_only_others_ran():
    assert ranking.standings([record("a", "forward", "flex", 1.0)]) == []


def test_groups_are_cases_that_differ_in_length():
    (dense, *rest) = ranking.groups(RECORDS)
    assert (dense.name, dense.lengths) == ("dense-bf16-d64-full", (1024, 4096))
    assert dense.ratio == pytest.approx((0.8 * 2) ** 0.5)
    assert (dense.backend("ours"), dense.backend("peer")) == ("cuda+", "fa3+")
    assert dense.mean("ours", "tflops") == pytest.approx((100 * 10) ** 0.5)
    assert len(rest) == 3
    assert ranking.series(record("dense-bf16-d64-full-s512@fp16", "forward", "cuda", 1)) == ("dense-bf16-d64-full@fp16")
    assert ranking.series(record("pet-md-4096", "forward", "cuda", 1)) == "pet-md-4096"


def test_geomeans_and_claims():
    found = []
    (claim, *_) = (c for c in bench.CLAIMS if c.kind == "forward" and c.baseline == "flex")
    for i, id in enumerate(claim.cases):
        found.append(record(id, "forward", "triton", 10.0))
        found.append(record(id, "forward", "flex", (20.0, 5.0)[i % 2]))
    ((*about, ratio, count),) = ranking.geomeans(found)
    assert (about, count) == (["dense", 64, "forward", "triton", "flex"], 8)
    assert ratio == pytest.approx(1)
    (row,) = report.claims(found).rows
    assert row[1:] == ["triton vs flex", "1.00x", ">= 1x", "met"]
    found[0] = record(claim.cases[0], "forward", "triton", None, "failed: out")
    (row,) = report.claims(found).rows
    assert "1 of 8 missing" in row[2]
    assert row[-1] == "not met"


def test_claims_about_each_case_and_the_best_of_several():
    claim = next(c for c in bench.CLAIMS if c.each and "," in c.baseline and c.kind == "forward")
    found = []
    for i, id in enumerate(claim.cases):
        found.append(record(id, "forward", "cuda", 10.0))
        found.append(record(id, "forward", "sdpa:efficient", 50.0))
        if i == 1:
            found.append(record(id, "forward", "cueq", 15.0))
    holding = next(h for h in ranking.claims(found) if h.claim is claim)
    assert (holding.value, holding.missing, holding.met) == (1.5, 0, False)


def test_claims_of_host_time_take_the_best_sample():
    (row,) = report.claims([record("small-call", "host", "cuda", 16.0)]).rows
    assert row[2:] == ["14.4 us", "<= 15 us", "met"]


def test_tables_as_text_and_markdown():
    shown = [bench.plain(t) for t in bench.tables(RECORDS)]
    marked = [bench.markdown(t) for t in bench.tables(RECORDS)]
    for text in ("\n".join(shown), "\n".join(marked)):
        assert "12.0 us" in text
        assert "failed: out" in text
        assert "too large" in text
        assert "In all: wins 2, draws 1, loses 2." in text
        assert "NVIDIA H200, torch 2.11, abc1234" in text
    assert "| fa3 | 8.0 us | 0.80x | **loses** |" in "\n".join(marked)
    summary = bench.markdown(report.summary(RECORDS))
    assert "| dense-bf16-d64-full, S 1024 to 4096 | forward | cuda+ | 31.6 TFLOP/s |" in summary
    assert "wins 1, **loses 1** |" in summary
    refusals = report.refusals(RECORDS)
    assert ["flex", "af3-pair (backward)", "no gradient"] in refusals.rows


def test_speed_where_memory_is_the_ceiling():
    near = record("decode-b1-s4096", "forward", "cuda", 1.0, gbps=3900.0, tflops=10.0)
    host = [record("small-call", "host", name, 16.0) for name in ("cuda", "sdpa:default")]
    first, second = report.standings([near, *host]).rows
    assert first[4] == "3900 GB/s"
    assert second[3:5] == ["16.0 us", "-"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2237.4, "2240"), (15.0, "15"), (65.25, "65.2"), (0.01234, "0.0123"), (1.5e7, "15000000")],
)
def test_numbers_have_no_exponent(value, text):
    assert report._digits(value) == text


def test_nothing_is_said_of_whoever_was_not_asked():
    alone = [record("af3-pair", "forward", "triton", 1.0)]
    assert report.standings(alone).rows == report.claims(alone).rows == []


def test_comparison_of_two_runs(tmp_path, capsys):
    old = [
        record("a", "forward", "cuda", 20.0),
        record("a", "backward", "cuda", 20.0),
        record("b", "forward", "cuda", 9.0),
        record("gone", "forward", "cuda", 9.0),
    ]
    new = [
        record("a", "forward", "cuda", 10.0, commit="def5678", dirty=True),
        record("a", "backward", "cuda", 20.2, commit="def5678", dirty=True),
        record("b", "forward", "cuda", 18.0, commit="def5678", dirty=True),
    ]
    found = ranking.changes(old, new)
    assert [c.result for c in found] == ["faster", "no difference", "slower"]
    table = bench.comparison(old, new)
    assert table.rows[0][5:] == ["2.00x", "faster"]
    assert table.rows[-2][:3] + table.rows[-2][5:] == ["geometric mean", "forward", "cuda", "1.00x", "of 2"]
    assert table.note.startswith("def5678 with changes against abc1234")
    assert "ran at 1.00x of before" in table.note
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, records in zip(files, (old, new), strict=True):
        path.write_text(json.dumps(records))
    assert cli.main(["report", "--compare", *map(str, files)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert cli.main(["report", "--compare", str(files[0])]) == 2
    assert "two files" in capsys.readouterr().err


def page(tmp_path, body, table="summary", source="results.json"):
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "results.json").write_text(json.dumps(RECORDS))
    readme = tmp_path / "README.md"
    begin = f"<!-- bench:begin {table} {source} -->"
    readme.write_text(f"# Title\n\n{begin}\n{body}<!-- bench:end -->\n\nThe end.\n")
    return readme


def test_what_was_measured_again_is_merged(tmp_path, capsys):
    """Other backends of that case and pass leave, other passes and cases stay where they are, new cases come last."""
    again = [
        record("dense-bf16-d64-full-s1024", "forward", "cuda", 9.0),
        record("dense-bf16-d64-full-s1024", "forward", "sdpa:flash", 11.0),
        record("new-case", "forward", "cuda", 1.0),
    ]
    of = lambda records: [(r["case"]["id"], r["pass"], r["backend"]) for r in records]  # noqa: E731
    assert of(bench.merged(RECORDS, again)) == of([*again[:2], *RECORDS[5:], again[2]])
    assert bench.merged(RECORDS, []) == RECORDS
    assert bench.merged(RECORDS, RECORDS[:1])[:2] == [RECORDS[0], RECORDS[5]]

    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, records in zip(files, (RECORDS, again), strict=True):
        path.write_text(json.dumps(records))
    assert cli.main(["report", "--merge", *map(str, files)]) == 0
    assert json.loads(files[0].read_text()) == bench.merged(RECORDS, again)
    assert "new-case" in capsys.readouterr().out
    for refused in (["--merge", str(files[0])], ["--merge", "--compare", *map(str, files)]):
        before = files[0].read_text()
        assert cli.main(["report", *refused]) == 2
        assert files[0].read_text() == before


def test_pages_are_rewritten_between_markers(tmp_path):
    readme = page(tmp_path, "\nOld news.\n\n")
    assert report.refresh(tmp_path, write=False) == [readme]
    assert "Old news." in readme.read_text()
    assert report.refresh(tmp_path) == [readme]
    text = readme.read_text()
    assert "Old news." not in text
    assert text.startswith("# Title\n\n<!-- bench:begin summary results.json -->\n\n| what |")
    assert text.endswith("\n\n<!-- bench:end -->\n\nThe end.\n")
    assert report.refresh(tmp_path) == [], "a second time changes nothing"


def test_losses_are_named_and_nothing_else():
    """Cases that somebody else wins, also for want of a result of ours; a draw and a win are none."""
    lost = [["dense-bf16-d64-full-s1024", "forward", "fa3", "0.80x"]]
    assert report.losses(RECORDS).rows == [*lost, ["escaip", "forward", "sdpa:math", "-"]]
    won = [r for r in RECORDS if r["backend"] not in ("fa3", "sdpa:math")]
    assert report.losses(won).rows == []


def test_a_table_of_several_runs_compares_none_with_another(tmp_path):
    """Each file is a table of its own; a row that two of them have stands once."""
    other = [
        record("dense-bf16-d64-full-s1024", "forward", "cuda", 1.0),  # another run, other clocks
        record("dense-bf16-d64-full-s1024", "forward", "fa3", 2.0),
        record("gqa", "backward", "cuda", 10.0),
        record("gqa", "backward", "fa3", 9.0),
    ]
    (tmp_path / "other.json").write_text(json.dumps(other))
    readme = page(tmp_path, "", "losses", "results.json,other.json,other.json")
    assert report.refresh(tmp_path) == [readme]
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| dense-bf16-d64-full-s1024 | forward | fa3 | 0.80x |",
        "| escaip | forward | sdpa:math | - |",
        "| gqa | backward | fa3 | 0.90x |",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"table": "nonsense"}, "no table named"), ({"source": "none.json"}, "there is no file")],
)
def test_pages_that_ask_for_what_is_not_there(tmp_path, options, message):
    page(tmp_path, "", **options)
    with pytest.raises(bench.BenchError, match=message):
        report.refresh(tmp_path)


def test_tables_in_this_repository_are_what_the_results_say():
    """`python -m flashsci report --write` after every change of reports/bench."""
    assert report.refresh(ROOT, write=False) == []


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    from tools.bench.plots import draw

    written = draw(RECORDS, tmp_path / "figures")
    assert [path.name for path in written] == [
        "h200-standings.png",
        "h200-dense-forward-speed.png",
        "h200-dense-forward-error.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_report_draws_and_prints(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RECORDS))
    assert cli.main(["report", str(path), "--plots", str(tmp_path / "figures")]) == 0
    shown = capsys.readouterr().out
    assert "loses" in shown
    assert (tmp_path / "figures" / "h200-standings.png").is_file()
    assert cli.main(["report", str(tmp_path / "none.json")]) == 2
