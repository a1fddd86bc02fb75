import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python examples/force_field`
sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/, which is not in the wheel

from force_field.train import app

app()
