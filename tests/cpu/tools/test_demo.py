"""The README's example and the demo on crystals, in small."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

pytest.importorskip("ase")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "examples"))

import crystals  # noqa: E402


def test_readme_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope = {}
    exec(code, scope)
    assert scope["distance"].grad.shape == (2, 1, 100, 100)
    assert scope["out"].shape == (40, 8, 32)
    assert "chosen 'reference'" in capsys.readouterr().out or torch.cuda.is_available()


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    """Triton's interpreter, which tests/conftest.py chose, asks again at the first launch."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    batch = crystals.structures(["Cu", "H2O", "CH4"]).to(torch.device("cpu"), torch.float32)
    return batch, crystals.Layer()


def test_structures_are_packed_with_nearest_images(small):
    batch, _ = small
    assert batch.names == ["Cu", "H2O", "CH4"]
    assert batch.crystal == [True, False, False]
    assert batch.lens[1:] == [3, 5]
    assert batch.cu_seqlens.tolist() == [0, *torch.tensor(batch.lens).cumsum(0).tolist()]
    r = (batch.positions[batch.j] - batch.positions[batch.i] + batch.image).norm(dim=1)
    copper = r[batch.pairs(0)].view(batch.lens[0], batch.lens[0])
    torch.testing.assert_close(copper, copper.T)
    # Copper is face-centred cubic: every atom has 12 nearest neighbours at a / sqrt(2).
    shell = copper + 100 * torch.eye(len(copper))
    assert shell.min() == pytest.approx(3.63 / 2**0.5, rel=0.01)
    assert ((shell < 1.05 * shell.min()).sum(1) == 12).all()
    with pytest.raises(ValueError, match="Unobtainium"):
        crystals.structures(["Unobtainium"])


def test_every_way_computes_the_same(small):
    found, reasons = crystals.run(crystals.call_of(*small), 0.01)
    assert {"reference", "sdpa, padded"} <= set(found)
    assert set(found) | set(reasons) == {"reference", "sdpa, padded", "triton", "cuda"}
    for way in found.values():
        assert way["problems"] == []
        assert set(way["errors"]) == set(crystals.TENSORS)
        assert set(way["ms"]) == {"forward", "backward"}


def test_forces_add_up_to_zero(small):
    batch, layer = small
    force = crystals.forces(batch, layer, "reference")
    assert force.abs().max() > 1e-3
    for n in range(len(batch.lens)):
        total = force[batch.atoms(n)].sum(0)
        assert total.abs().max() < 1e-4 * force.abs().max()


def test_attention_weights_add_up_to_one(small):
    batch, layer = small
    for p, size in zip(crystals.weights(batch, layer), batch.lens, strict=True):
        assert p.shape == (crystals.HEADS, size, size)
        torch.testing.assert_close(p.sum(-1), torch.ones(crystals.HEADS, size))


def test_demo_from_beginning_to_end(tmp_path, monkeypatch, capsys):
    canned = {"atoms": 3, "seconds": 1.0, "problems": [], "errors": {"out": (1e-7, 1e-6)}}
    monkeypatch.setattr(crystals, "interpreted", lambda: canned)
    options = ["--only", "Cu", "H2O", "--seconds", "0.01", "--output", str(tmp_path)]
    assert crystals.main(options) == 0
    shown = capsys.readouterr().out
    assert "-> " in shown, "explain is part of the demo"
    assert (tmp_path / "crystals.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "crystals.json").read_text())
    assert record["fp32"]["reference"]["problems"] == []


@pytest.mark.slow
def test_triton_piece_in_the_interpreter():
    pytest.importorskip("triton")
    found = crystals.interpreted()
    assert found.get("problems") == [], found
    assert set(found["errors"]) == {"lse", *crystals.TENSORS}
