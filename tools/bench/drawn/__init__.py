"""The suite `drawn`: calls drawn at random, timed by every candidate, and the regret of `auto` on them.

python -m flashsci bench --suite drawn --seed 1 --seconds 240 --json drawn-1.jsonl
python -m flashsci report drawn-1.jsonl
"""

from tools.bench.drawn.course import run
from tools.bench.drawn.report import read, summary

__all__ = ["read", "run", "summary"]
