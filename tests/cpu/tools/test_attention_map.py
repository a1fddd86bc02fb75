"""examples/attention_map.py draws a molecule from probabilities whose rows sum to 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ase")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[3]


def test_the_figure_is_drawn(tmp_path):
    path = tmp_path / "map.png"
    subprocess.run([sys.executable, "examples/attention_map.py", str(path)], cwd=ROOT, check=True)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10000


def test_shares_and_molecule(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import attention_map
    import torch

    atoms = attention_map.molecule()
    assert atoms.get_chemical_formula() == "C8H10N4O2"
    p, entropy, key_sum = attention_map.maps(atoms)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 24))
    torch.testing.assert_close(key_sum, p.sum(-2))
    torch.testing.assert_close(entropy, torch.special.entr(p).sum(-1))
