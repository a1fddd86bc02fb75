"""The picture of docs/guide/distributed.md: the rows of each rank, and its block of scores at each step of a ring.

    python tools/distributed/draw_ranks.py           the SVG
    python tools/distributed/draw_ranks.py --write   into docs/figures/distributed-ranks.svg; a test compares

Drawn from the plans of flashsci.distributed: a causal call of eight chunks over four ranks, in both layouts.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from flashsci.distributed.cost import planned  # noqa: E402
from flashsci.distributed.layout import LAYOUTS  # noqa: E402

FILE = ROOT / "docs" / "figures" / "distributed-ranks.svg"
CHUNKS, RANKS, CELL, MARGIN, GAP = 8, 4, 34, 60, 90
COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
)  # light enough for black text, dark enough for a light page


def computed(layout: str) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, step) of every (query, key) that is computed, each chunk being one token."""
    call = planned(CHUNKS, RANKS, causal=True, layout=layout)
    found = {}
    for rank in range(RANKS):
        queries = [i for a, b in call.queries.intervals(rank) for i in range(a, b)]
        for step in range(RANKS):
            source = (rank - step) % RANKS
            keys = [i for a, b in call.keys.intervals(source) for i in range(a, b)]
            for piece in call.pieces(rank, source):
                for i in range(*piece.rows):
                    for j in range(*piece.keys):
                        row, key = i - piece.rows[0], j - piece.keys[0]
                        if piece.right < 0 or key <= row + piece.right:
                            found[queries[i], keys[j]] = rank, step
    return found


def rank_of(layout: str, chunk: int) -> int:
    rows = planned(CHUNKS, RANKS, layout=layout).queries
    return next(r for r in range(RANKS) if any(a <= chunk < b for a, b in rows.intervals(r)))


def text(x: float, y: float, said: str, size: int = 13, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{said}</text>'


def cell(x: float, y: float, colour: str, said: str, size: float = CELL) -> list[str]:
    box = f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{size:g}" fill="{colour}" stroke="#888"/>'
    return [box, text(x + CELL / 2, y + size / 2 + 5, said)]


def panel(left: float, layout: str) -> list[str]:
    """The blocks of scores of a layout: queries down, keys across, the step in each."""
    top = MARGIN
    lines = [
        text(left + CELL * CHUNKS / 2, 20, layout, 15),
        text(left + CELL * CHUNKS / 2, 38, "keys of rank", 12),
    ]
    for chunk in range(CHUNKS):
        said, colour = str(rank_of(layout, chunk)), COLOURS[rank_of(layout, chunk)]
        lines += cell(left + chunk * CELL, top - 16, colour, said, 14)
        lines += [text(left - 10, top + chunk * CELL + CELL / 2 + 5, said, 13, "end")]
    for (query, key), (rank, step) in sorted(computed(layout).items()):
        lines += cell(left + key * CELL, top + query * CELL, COLOURS[rank], str(step))
    bottom = top + CHUNKS * CELL
    lines += [
        f'<rect x="{left:g}" y="{top}" width="{CHUNKS * CELL}" height="{CHUNKS * CELL}" fill="none" stroke="#888"/>'
    ]
    blocks = [sum(r == rank for r, _ in computed(layout).values()) for rank in range(RANKS)]
    lines += [text(left + CELL * CHUNKS / 2, bottom + 22, "blocks by rank: " + ", ".join(map(str, blocks)))]
    return lines


def picture() -> str:
    width, height = MARGIN + 2 * CHUNKS * CELL + GAP, MARGIN + CHUNKS * CELL + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text transform="translate(16 {MARGIN + CELL * CHUNKS / 2:g}) rotate(-90)" font-size="12" text-anchor="middle">'
        "queries of rank</text>",
    ]
    for i, layout in enumerate(LAYOUTS):
        lines += panel(MARGIN - 16 + i * (CHUNKS * CELL + GAP - 20), layout)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(picture())
    else:
        print(picture())
