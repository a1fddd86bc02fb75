"""Registers, spills and shared memory of every kernel, as ptxas reports them; the table lives in reports/resources.md.

    python tools/kernels/resources.py                 print the table (compiles the units that changed)
    python tools/kernels/resources.py --write         and update reports/resources.md
    python tools/kernels/resources.py --all           compile every unit
    python tools/kernels/resources.py --arch 90       one architecture only, every unit

The table names the digest of the sources it was made from, so a test knows without compiling whether it is current.
"runs on" says which devices ever launch a kernel, by their shared memory: sm_80 code serves both 8.0 and 8.6 (8.9,
12.0), but launchers choose different kernels there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "reports" / "resources.md"
REPORT = ROOT / "reports" / "gpu-check.json"
ARCHS = (75, 80, 90)
CODE = {  # nvcc's targets for a folder of csrc, as in cmake/Archs.cmake
    "sm75": lambda archs: ("compute_75", "sm_75"),
    "sm80": lambda archs: ("compute_80", ",".join(f"sm_{a}" for a in archs if a >= 80)),
    "sm90": lambda archs: ("compute_90a", "sm_90a"),
}
# Devices that the code of an architecture serves: KiB of shared memory an SM has, and a block may ask for. 8.6 stands for
# 8.9 and 12.0, too, and 8.0 for 8.7.
SHARED_KIB = {
    75: {"7.5": (64, 64)},
    80: {"8.0": (164, 163), "8.6": (100, 99)},
    90: {"9.0": (228, 227)},
}
sys.path.insert(0, str(ROOT / "flashsci"))
sys.path.insert(0, str(ROOT))
import digest  # noqa: E402  (as a script: importing the package would need torch)
import records  # noqa: E402

from tools.kernels import compare_sass  # noqa: E402

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\d+)a?'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
# sm80: head dim, query rows, keys, warps, stages, CTAs per SM, 16-byte rows.
TILING = re.compile(r"TilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E+Lb([01])")
ALIBI = re.compile(r"14forward_kernelI\w+TilingI\w+E+Lb[01]ELb1E")
# sm80 with bias or mask: the same, members, bytes of a bias element (0: anything); 16-byte rows.
TILING_BIAS_MASK = re.compile(
    r"BiasMaskTilingINS\w?_6TilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)EEELi(\d)ELi(\d)EEELb([01])"
)
# sm80, backward by keys: head dim, keys, query rows, warps over keys, over queries, stages, CTAs per SM.
KEYS_SM80 = re.compile(r"BackwardTilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E")
# ... by queries, and of a shared bias: head dim, query rows, keys, stages, CTAs per SM.
QUERIES_SM80 = re.compile(r"(?:Query|Bias)TilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E")
# sm75: head dim, query rows, keys, warps, CTAs per SM; 16-byte rows, bias or mask.
TILING_SM75 = re.compile(r"TilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E+Lb([01])ELb([01])E")
# sm90: head dim, keys, consumer warpgroups, stages, bias or mask, head dim of v; windowed, plain scores, packed.
TILING_SM90 = re.compile(r"TilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELb([01])ELi(\d+)E+Lb([01])ELb([01])ELb([01])E")
# sm90, 8-bit floats: head dims of q and k and of v, keys, consumer warpgroups, stages; sums over all keys; packed.
TILING_FP8 = re.compile(r"fp8_forward_kernelI\w*TilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELb([01])E+Lb([01])E")
# sm80, fp32: head dim, warps, m16 blocks of a warp, n8 blocks of keys, CTAs per SM; bias or mask.
TILE_FP32 = re.compile(r"ForwardTileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E+Lb([01])")
# ... its backward: kernel; the same with columns for keys; the rows of a CTA (0: queries), bias or mask.
BACKWARD_FP32 = re.compile(
    r"(backward|bias_gradient)_fp32_kernelI\w*?12BackwardTile"
    r"ILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E+(?:Li(\d)ELb([01])E)?"
)
# ... of short rows of keys: head dim, warps, queries of a chunk, CTAs per SM.
SHORT_FP32 = re.compile(r"ShortTileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E")
# sm90 backward: kind; head dims of q and k and of v; up to 128 query rows, bias or mask (2: separate buffers), many
# tiles; packed, softcap (the main kernel alone).
BACKWARD_SM90 = re.compile(
    r"backward_(?P<kind>[a-z]*)_?kernelI.*BackwardTilingILi(?P<dim>\d+)ELi(?P<dim_v>\d+)E"
    r"(?:Li(?P<rows>\d+)ELNS\w?_13BiasMaskTilesE(?P<bias_mask>[012])ELb(?P<many>[01])E)?"
    r"E*Lb(?P<packed>[01])(?:ELb(?P<softcap>[01]))?"
)
# sm90 triangle attention: bytes of a bias element, members; backward: kind, blocks of queries of a consumer.
TRIANGLE_BACKWARD_SM90 = re.compile(r"triangle_(backward|preprocess|postprocess)_kernelI(?:.*TriangleTilingILi(\d)E)?")
TRIANGLE_SM90 = re.compile(r"triangle_forward_kernelI.*TilingILi(\d)ELi(\d)E")
TRIANGLE_COPY_SM90 = re.compile(r"triangle_forward_copy_bias_kernelILi([24])E")  # bytes of an element
DECODE_SM90 = re.compile(r"(?:DecodeTilingI|decode_combineI.*)Li(\d+)E")
# Short sequences: kernel; blocks of 8 rows, units of 16 columns, whether heads have exactly that number; whether
# rows go through shared memory; for gradients, heads for which there is room (0: the number of a block).
SMALL = re.compile(r"5small\d+small_(forward|backward)_kernelI.*?ShapeILi(\d)ELi(\d)ELb([01])E+Lb([01])E(?:Li(\d)E)?")
# A bias whose heads are neighbours: kernel; head dim, tensors whose rows a CTA keeps; in 16 bits pieces of sums.
PAIR = re.compile(
    r"4pair(?:4half)?\d+(forward|backward|statistics)_kernel(?:I\w*?TilingI(?:\w*?16E)?Li(\d+)ELi(\d)E(?:Li(\d+)E)?)?"
)
# Paged attention: kernel; format of the cache; head dim, bytes of an element of the cache.
PAGED = re.compile(
    r"5paged\d+(?P<kind>paged|plan|combine)_kernelI.*?(?:4(?P<format>Same|E\dm\d)E.*?)?TilingILi(?P<dim>\d+)ELi(?P<bytes>\d)E"
)


@dataclass(frozen=True)
class Kernel:
    unit: str  # such as sm80/fwd_bf16
    arch: int
    name: str  # mangled
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def is_backward_sm80(self) -> bool:
        """Whether it is a 16-bit kernel of sm80's backward; the units of dropout have both passes."""
        dropping = self.unit.startswith("sm80/dropout") and "forward_" not in self.name
        return self.unit in ("sm80/bwd_bf16", "sm80/bwd_fp16") or dropping

    @property
    def tiling(self) -> tuple[int, ...] | None:
        """(head dim, query rows, keys, warps, stages, CTAs per SM, 16-byte rows) of a forward kernel."""
        if self.unit.startswith("sm80/weights"):
            return 0, 0, 0, 8, 0, 8, 0
        if found := BACKWARD_SM90.search(self.name):
            dim, rows, keys = (
                int(found["dim"]),
                int(found["rows"] or 64),
                128 if found["rows"] else 64,
            )
            return (dim, rows, 0, 8, 0, 1, 1) if found["kind"] else (dim, rows, keys, 12, 2, 1, 1)
        if found := PAIR.search(self.name):
            if found[2] is None:
                return 0, 64, 0, 8, 0, 8, 1
            room = 225 * 1024 - int(found[3]) * self.pair_box - self.pair_parts
            stages, warps = min(3, room // self.pair_stage), 12 if found[4] else 8
            return int(found[2]), 32, 32, warps, stages, 1, 1
        if found := SMALL.search(self.name):
            rows = 8 * int(found[2])
            return 16 * int(found[3]), rows, rows, 4, 0, 1, 1
        if found := PAGED.search(self.name):
            dim, narrow = int(found["dim"]), found["bytes"] == "1"
            if found["kind"] == "combine":
                return dim, 4, 0, 4, 0, 8, 1
            if self.unit.startswith("sm90"):
                keys, stages = (128, 512 // dim) if narrow else (8192 // dim, 5)
            else:  # the stages that there is room for, up to 8: those of the smallest room
                keys, stages = 8192 // dim // int(found["bytes"]), 4 if dim == 64 else 3
            return (dim, 64, keys, 32, 0, 1, 1) if found["kind"] == "plan" else (dim, 64, keys, 12, stages, 1, 1)
        if self.unit.startswith("sm90"):
            if found := DECODE_SM90.search(self.name):
                dim = int(found[1])
                if "decode_combine" in self.name:
                    return dim, 4, 0, 4, 0, 8, 1
                return dim, 64, 64 if dim == 256 else 128, 5, 4 if dim == 64 else 3, 1, 1
            if found := TRIANGLE_SM90.search(self.name):
                members = int(found[2])
                return 32, 256 // members, 64, 20, 12 // members, 1, 1
            if TRIANGLE_COPY_SM90.search(self.name):
                return 32, 1, 0, 8, 0, 8, 1
            if found := TRIANGLE_BACKWARD_SM90.search(self.name):
                panel = 128 * int(found[2] or 1)
                return (32, panel, 64, 12, 2, 1, 1) if found[2] else (32, panel, 0, 8, 0, 1, 1)
            if found := TILING_FP8.search(self.name):
                dim, _, keys, consumers, stages, _, _ = map(int, found.groups())
                return dim, 64 * consumers, keys, 4 * (consumers + 1), stages, 1, 1
            found = TILING_SM90.search(self.name)
            if found is None:
                return None
            dim, keys, consumers, stages = (int(x) for x in found.groups()[:4])
            return dim, 64 * consumers, keys, 4 * (consumers + 1), stages, 1, 1
        if self.unit.startswith("sm75/bwd"):
            return self.backward_sm75
        if self.unit.startswith("sm75"):
            found = TILING_SM75.search(self.name)
            if found is None:
                return None
            dim, rows, keys, warps, blocks, vector, _ = (int(x) for x in found.groups())
            return dim, rows, keys, warps, 2, blocks, vector
        if self.unit == "sm80/bwd_fp32":
            return self.backward_fp32
        if self.is_backward_sm80:
            return self.backward_sm80
        if found := TILE_FP32.search(self.name):
            dim, warps, m, n, blocks, _ = (int(x) for x in found.groups())
            return dim, 16 * m * warps, 8 * n, warps, 1, blocks, 1
        if found := TILING_BIAS_MASK.search(self.name):
            return (*(int(x) for x in found.groups()[:6]), int(found[9]))
        found = TILING.search(self.name)
        return tuple(int(x) for x in found.groups()) if found else None

    @property
    def backward_sm75(self) -> tuple[int, ...] | None:
        """The same of a backward kernel: (head dim, query rows, keys, warps, stages, CTAs per SM, 16-byte rows)."""
        if found := re.search(r"_9KeyTilingILi(\d+)ELi(\d+)ELi(\d+)ELi2ELi(\d+)ELi(\d+)E+Lb([01])", self.name):
            dim, keys, rows, warps, blocks, either = map(int, found.groups())
        elif found := re.search(r"_11QueryTilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E+Lb([01])", self.name):
            dim, rows, keys, warps, blocks, either = map(int, found.groups())
        elif found := re.search(r"_10BiasTilingILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E", self.name):
            dim, rows, keys, blocks = map(int, found.groups())
            return dim, rows, keys, 4, 1, blocks, 0
        else:
            return (0, 0, 0, 8, 0, 4, 0) if "sm75" in self.name else None
        return dim, rows, keys, warps, 2, blocks, 1 - either

    @property
    def backward_sm80(self) -> tuple[int, ...]:
        """The same of a 16-bit backward kernel."""
        if (found := KEYS_SM80.search(self.name)) and "dq_kernel" not in self.name:
            dim, keys, rows, over_keys, over_queries, stages, blocks = map(int, found.groups())
            plain = int("backward_kernel" in self.name)
            return dim, rows, keys, over_keys * over_queries, stages, blocks, plain
        if found := QUERIES_SM80.search(self.name):
            dim, rows, keys, stages, blocks = map(int, found.groups())
            return dim, rows, keys, 4, stages, blocks, 0
        return 0, 0, 0, 8, 0, 4, 0

    @property
    def backward_fp32(self) -> tuple[int, ...]:
        """The same of an fp32 backward kernel, which copies any rows in one stage."""
        if found := SHORT_FP32.search(self.name):
            dim, warps, queries, blocks = map(int, found.groups())
            return dim, queries, 32 * warps, warps, 1, blocks, 0
        if found := BACKWARD_FP32.search(self.name):
            dim, warps, m, n, blocks = (int(x) for x in found.groups()[1:6])
            rows, columns = 16 * m * warps, 8 * n
            of_queries = found[7] in (None, "0")
            tile = (rows, columns) if of_queries else (columns, rows)
            return dim, *tile, warps, 1, blocks, 0
        return 0, 0, 0, 8, 0, 4, 0

    @property
    def variant(self) -> str:
        """The other template parameters of the kernel."""
        if self.unit.startswith("sm80/weights"):
            return "log weights" if "log_weights" in self.name else "weight gradient"
        if self.unit == "sm80/bwd_fp32":
            if found := BACKWARD_FP32.search(self.name):
                kind = {None: "bias gradient", "0": "queries", "1": "keys", "2": "keys, dk"}
                name = kind.get(found[7], "keys, dv")
                return name + (", bias or mask" if found[8] == "1" else "")
            kind = re.search(r"\d([a-z_]+)_fp32_kernel", self.name)
            return kind[1].replace("backward_short", "short rows of keys").replace("_", " ")
        if self.unit.startswith("sm75/bwd") or self.is_backward_sm80:
            kind = re.search(r"\d([a-z_]+)_kernel", self.name)
            name = kind[1].replace("_", " ") if kind else self.name
            return name + (", plain 16-byte rows" if self.tiling and self.tiling[-1] else "")
        if found := BACKWARD_SM90.search(self.name):
            words = (
                f"v {found['dim_v']}" * (found["dim_v"] != found["dim"]),
                found["kind"],
                {"1": "bias or mask", "2": "fp32 bias or mask by pairs"}.get(found["bias_mask"], ""),
                "packed" * (found["packed"] == "1"),
                "softcap" * (found["softcap"] == "1"),
                "tile after tile" * (found["many"] == "1"),
            )
            return " ".join(filter(None, words)) or "dense"
        if found := PAIR.search(self.name):
            return found[1]
        if found := SMALL.search(self.name):
            weights = ", weights" * ("WeightedProducts" in self.name)
            columns = ", any columns" * (found[4] == "0")
            room = f", room for {found[6]}" if found[6] not in (None, "0") else ""
            return found[1] + weights + columns + ", staged" * (found[5] == "1") + room
        if found := PAGED.search(self.name):
            narrow = found["kind"] == "paged" and found["bytes"] == "1"
            return str(found["format"]).lower() if narrow else str(found["kind"])
        if self.unit.startswith("sm90") and DECODE_SM90.search(self.name):
            return "combine" if "decode_combine" in self.name else "decoding"
        if found := TILING_FP8.search(self.name):
            values = f"v {found[2]}" * (found[2] != found[1])
            return " ".join(filter(None, (values, "fast" * int(found[6]), "packed" if found[7] == "1" else "dense")))
        if found := TRIANGLE_SM90.search(self.name):
            return f"{'fp32' if found[1] == '4' else '16-bit'} bias, {found[2]} members"
        if found := TRIANGLE_COPY_SM90.search(self.name):
            return f"copy of {'fp32' if found[1] == '4' else '16-bit'} bias"
        if found := TRIANGLE_BACKWARD_SM90.search(self.name):
            return "bias of many members" if found[2] else f"{found[1]}, bias of many members"
        if found := TILE_FP32.search(self.name):
            return "any rows" + (", bias or mask" if found[6] == "1" else "")
        found = TILING_SM90.search(self.name) if self.unit.startswith("sm90") else None
        if found is None:
            rows = "16-byte rows" if self.tiling and self.tiling[-1] else "any rows"
            turing = TILING_SM75.search(self.name) if self.unit.startswith("sm75") else None
            bias_mask = TILING_BIAS_MASK.search(self.name)
            if bias_mask is not None:
                kind = {"0": "any bias or mask", "2": "16-bit bias", "4": "fp32 bias"}[bias_mask[8]]
                return f"{rows}, {kind}" + (", two members" if bias_mask[7] == "2" else "")
            if turing is None and ALIBI.search(self.name):
                return f"{rows}, ALiBi"
            return rows + (", bias or mask" if turing and turing[7] == "1" else "")
        windowed, plain, packed = (x == "1" for x in found.groups()[6:])
        if found[5] == "1":
            return "bias or mask"
        values = f"v {found[6]}" * (found[6] != found[1])
        words = (
            values,
            "window" if windowed else "full",
            "" if plain else "softcap",
            packed * "packed",
        )
        return " ".join(filter(None, words))

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory for tiles: Q (twice up to D 128 on sm90, never on sm75), and `stages` of K and V."""
        if self.tiling is None:
            return 0
        if found := SMALL.search(self.name):  # of two heads; of more if there is room
            size = 4 if self.unit.endswith("fp32") else 2
            matrices, rows = 3 if found[1] == "forward" else 5, 8 * int(found[2])
            units, room = int(found[3]), int(found[6] or 0)
            if room > 0:  # rows in whole turns of all threads; lse of two heads
                step = 512 // (units * 16 * size)
                return matrices * -(-rows // step) * step * (room * units | 1) * 16 * size + 256
            of_head = (matrices * rows * (units | 1) | 1) * 16 * size
            return 2 * of_head if found[5] == "1" else 0
        dim, rows, keys, warps, stages, _, _ = self.tiling
        if found := PAIR.search(self.name):  # a CTA's own data, stages, parts of sums; barriers, and alignment to 1,024
            own = int(found[3] or 0) * self.pair_box + self.pair_parts
            return own + stages * self.pair_stage + 2048 * (stages > 0)
        if self.unit == "sm80/bwd_fp32":
            if not dim:
                return 0
            if SHORT_FP32.search(self.name):  # halves, their scales, statistics, dQ, the place
                halves = 8 * dim * (rows + keys)
                place = 20
                return (halves + 8 * keys + 16 * rows + 4 * rows * (dim + 8) + place + 127) // 128 * 128
            # Halves of rows, raw and halves of columns; scales, statistics, states of rows.
            if "_fp32_kernel" in self.name and self.variant.startswith("keys"):
                rows, keys = keys, rows
            stream = (16 * keys * dim + keys + 8 * warps + 127) // 128 * 128
            return (8 * rows * dim + stream + 8 * rows + 16 * keys + 127) // 128 * 128
        if TILE_FP32.search(self.name):  # halves of Q, K and V, raw K and V, a scale for each row of Q
            padded = [-(-n // 128) * 128 for n in (keys + 8 * warps, 4 * rows)]
            return 4 * dim * (rows + 4 * keys) + sum(padded)
        if self.is_backward_sm80:
            return self.shared_of_backward_sm80
        if "KeyTiling" in self.name:  # stages of Q and dO, half of V at D 128, statistics, the work
            staged = 2 * dim * max(2 * stages * rows, keys) + dim * keys * (dim > 96)
            return (staged + 16 * (dim <= 96) + stages * rows * 8 + 32 + 127) // 128 * 128
        if "BiasTiling" in self.name:
            return 2 * dim * 2 * (rows + keys)
        if found := BACKWARD_SM90.search(self.name):
            if found["kind"]:
                return 0
            dim_v = int(found["dim_v"])
            if not found["rows"]:  # K, V, two Q, dO; two dS, P; two slices of dQ; statistics
                out = 2 if dim + dim_v <= 384 else 1  # stages of dO
                inputs = 2 * (dim * (keys + 2 * rows) + dim_v * (keys + out * rows))
                slices = 2 * 4 * rows * (32 if dim == 128 else 64)
                return inputs + 6 * rows * keys + slices + 4 * (2 + out) * rows
            dim, dim_v = (-(-x // 64) * 64 for x in (dim, dim_v))  # boxes
            inputs = 2 * (dim + dim_v) * (keys + stages * rows)  # K, V; Q, dO
            ds = 2 * rows * keys * (stages + (found["bias_mask"] == "1"))
            if found["bias_mask"] == "2":  # fp32, up to D 64 two stages of it and of a mask
                ds += rows * keys * (2 * 5 if dim == dim_v == 64 else 4)
            return inputs + ds + 8 * stages * rows + 4 * dim * rows  # statistics; dQ
        if found := PAGED.search(self.name):  # Q, once at D 256, K and V, sums of 8 warps
            size = int(found["bytes"])
            columns = min(dim, 128 // size) if self.unit.startswith("sm90") else 32
            of_q = 2 * dim * rows * (2 if dim < 256 else 1)
            return of_q + 2 * size * dim * stages * keys + 512 * columns if stages else 0
        if DECODE_SM90.search(self.name):
            return 2 * dim * (rows + 2 * stages * keys) if keys else 0
        if found := TILING_FP8.search(self.name):  # Q twice (fast: once, as V), K, V and V transposed, output staging
            q_stages, v_stages = (1, 1) if found[6] == "1" else (2, stages)
            values = int(found[2]) * (v_stages + stages) * keys
            return dim * (q_stages * rows + stages * keys) + values + (warps - 4) * 2048
        if TRIANGLE_SM90.search(self.name):  # six blocks of a bias; K, V, Q and output
            return 6 * 16384 + 12 * 2 * 2 * dim * keys + 2 * 4 * 2 * dim * 64
        if found := TRIANGLE_BACKWARD_SM90.search(self.name):
            tile = 2 * dim * 64  # K, V; two stages of Q and dO; dK and dV: in 16 bits, in fp32 as dQ
            bias = rows * keys * 4
            return 14 * tile + 2 * 2 * 64 * 64 + bias + 6 * 2 * tile + 4 * 528 if found[2] else 0
        if found := TILING_BIAS_MASK.search(self.name):
            members, bias = int(found[7]), int(found[8])
            units = 2 if dim * members * (rows // int(found[4]) // 16) <= 128 else 1
            stage = members * keys * (4 * dim + 1) + rows * keys * (bias or 4)
            return units * members * rows * dim * 2 + stages * -(-stage // 128) * 128
        q_stages = 2 if self.unit.startswith("sm90") and dim <= 128 else 1
        q_stages = 0 if self.unit.startswith("sm75") else q_stages
        if found := TILING_SM90.search(self.name):  # boxes of 64 columns
            columns, values = (-(-int(found[i]) // 64) * 64 for i in (1, 6))
            tiles = 2 * (columns * (q_stages * rows + stages * keys) + values * stages * keys)
            pairs = found[5] == "1"  # output staging, 2 KiB a warp once or twice; bias, mask
            once = dim <= 64 or warps == 16 or columns != values or pairs
            tiles += (warps - 4) * 2048 * (1 if once else 2)
            return tiles + pairs * (80 if dim > 64 else 96 if rows == 256 else 120) * 1024
        return 2 * dim * (q_stages * rows + 2 * stages * keys)

    @property
    def pair_box(self) -> int:
        """Bytes of 32 rows of all heads of a CTA of csrc/sm90/pair."""
        found = PAIR.search(self.name)
        if found is None:
            return 0
        return 8 * 32 * (2 if found[4] else 4) * int(found[2] or 0)

    @property
    def pair_parts(self) -> int:
        """Bytes that other CTAs push to it: pieces of 16 bytes of each lane, of two tiles of eight heads."""
        found = PAIR.search(self.name)
        return 8 * 2 * 32 * 16 * int(found[4] or 0) if found is not None else 0

    @property
    def pair_stage(self) -> int:
        """Bytes of its stages: rows of two tensors, their pairs, statistics."""
        return 2 * self.pair_box + 32 * 32 * 32 + 8 * 32 * 8

    @property
    def shared_of_backward_sm80(self) -> int:
        dim, rows, keys, _, stages, _, plain = self.tiling
        if not dim:
            return 0
        if KEYS_SM80.search(self.name):  # K, V, stages of Q and dO, dS and P, statistics; the work
            roles = 1 if dim <= 64 else 2
            tiles = (2 * keys + 2 * stages * rows) * dim * 2 + roles * keys * rows * 2
            return -(-(tiles + stages * rows * 8) // 128) * 128 + (0 if plain else 128)
        if "bias_gradient" in self.name:  # stages of all, statistics; two masks of keys
            return -(-(stages * (rows + keys) * dim * 4 + stages * rows * 8 + 2 * keys) // 128) * 128
        return (2 * rows + 2 * stages * keys) * dim * 2 + rows * 8

    def _is_smaller_than(self, other: Kernel) -> bool:
        """Whether a device runs the other kernel instead if that fits: fp32 forward, the widest heads."""
        same = (self.unit, self.arch, self.variant) == (other.unit, other.arch, other.variant)
        wide = self.tiling and other.tiling and self.tiling[0] == other.tiling[0] > 128
        return bool(same and wide and "/fwd" in self.unit and self.shared < other.shared)

    def runs_on(self, others: list[Kernel]) -> tuple[str, ...]:
        """The devices that ever run it. others: all kernels."""
        rooms = SHARED_KIB[self.arch].items()
        if SMALL.search(self.name):
            return tuple(SHARED_KIB[self.arch])
        if self.tiling and SHORT_FP32.search(self.name):
            dim, _, keys, _, _, blocks, _ = self.tiling
            wide = dim > 16 and keys > 32  # only if an SM holds all its CTAs (takes_short)
            return tuple(
                device for device, (room, _) in rooms if not wide or blocks * (self.shared + 1024) <= room * 1024
            )
        if self.tiling is not None and "_fp32" in self.unit:
            room = lambda k: {d for d, (_, most) in rooms if k.shared <= most * 1024}  # noqa: E731
            brothers = [k for k in others if self._is_smaller_than(k)]
            taken = set().union(*map(room, brothers))
            return tuple(d for d, _ in rooms if d in room(self) - taken)
        if self.tiling is None or not self.unit.startswith("sm80"):
            return tuple(SHARED_KIB[self.arch])
        dim, rows, keys, _, stages, blocks, vector = self.tiling
        if self.is_backward_sm80:
            if not KEYS_SM80.search(self.name) or "dq_kernel" in self.name:
                return tuple(SHARED_KIB[self.arch])
            # The largest tile that fits.
            same = [
                k
                for k in others
                if (k.unit, k.arch) == (self.unit, self.arch)
                and KEYS_SM80.search(k.name)
                and (k.tiling or (0,))[0] == dim
            ]
            found = []
            for device, (room, _) in rooms:
                fits = [k for k in same if k.shared + 1024 <= room * 1024]
                largest = max(fits, key=lambda k: k.shared).tiling or ()
                if (rows, keys) == largest[1:3]:
                    found.append(device)
            return tuple(found)
        # One or two stages, by whether two of the latter fit an SM; with ALiBi and dropout there is one tile.
        alone = ALIBI.search(self.name) or "FlashsciDropout" in self.name
        if TILING_BIAS_MASK.search(self.name) or alone or not vector or dim > 128 or rows <= 64:
            return tuple(SHARED_KIB[self.arch])
        two = 2 * dim * (rows + 4 * keys)
        return tuple(
            device
            for device, (room, _) in rooms
            if (stages == 2) == (two <= 99 * 1024 and blocks * (two + 1024) <= room * 1024)
        )


def parse(unit: str, log: str) -> list[Kernel]:
    """Kernels in the output of nvcc -Xptxas -v."""
    found: list[Kernel] = []
    entry: re.Match[str] | None = None
    spill = (0, 0, 0)
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry, spill = match, (0, 0, 0)
        elif match := SPILL.search(line):
            spill = (int(match[1]), int(match[2]), int(match[3]))
        elif (match := USED.search(line)) and entry is not None:
            found.append(Kernel(unit, int(entry["arch"]), entry["name"], int(match[1]), *spill))
            entry = None
    return found


def compile_unit(unit: str, archs: tuple[int, ...]) -> tuple[list[Kernel], str]:
    """The kernels of a unit, and the hash of their code."""
    virtual, code = CODE[unit.split("/")[0]](archs)
    flags = (ROOT / "cmake" / "nvcc_flags.txt").read_text(encoding="utf-8").split()
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("NVCC", "nvcc"), *flags, "-Xptxas=-v"]
        command += ["-gencode", f"arch={virtual},code=[{code}]"]
        command += ["-c", str(digest.cuda_sources(ROOT)[f"cuda/{unit}"]), "-o", f"{folder}/unit.o"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{result.stderr}")
        code = compare_sass.unit_hash(compare_sass.kernels(Path(folder, "unit.o")))
    return parse(unit, result.stdout + result.stderr), code


def collect(units: list[str], archs: tuple[int, ...] = ARCHS) -> tuple[list[Kernel], dict[str, str]]:
    """All kernels of the units, and the hash of each unit's code."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = dict(zip(units, pool.map(lambda u: compile_unit(u, archs), units), strict=True))
    kernels = [k for found, _ in made.values() for k in found]
    return (
        sorted(kernels, key=lambda k: (k.unit, k.arch, k.tiling or (), k.name)),
        {f"cuda/{unit}": code for unit, (_, code) in made.items()},
    )


def rows_of(kernels: list[Kernel]) -> list[str]:
    """Lines of the table."""
    lines = []
    for k in kernels:
        if k.tiling is None:
            cells: tuple[object, ...] = (k.unit, k.arch, k.name, *[""] * 5, k.registers)
        else:
            dim, rows, keys, warps, stages, blocks, _ = k.tiling
            cells = (
                k.unit,
                k.arch,
                dim,
                f"{rows} x {keys}",
                warps,
                stages,
                blocks,
                k.variant,
                k.registers,
            )
        cells += (
            k.spill_stores + k.spill_loads,
            f"{k.shared / 1024:g}",
            ", ".join(k.runs_on(kernels)) or "none",
        )
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return lines


def table(lines: list[str], code: dict[str, str]) -> str:
    return "\n".join(
        [
            "# Registers, spills and shared memory of the CUDA kernels",
            "",
            "Written by `python tools/kernels/resources.py --write` from `ptxas -v`; do not edit.",
            "",
            "The digest of each unit's sources, and the hash of its machine code (tools/kernels/compare_sass.py):",
            "",
            *(f"- {name}: `{value}`, code `{code[name]}`" for name, value in sorted(digest.cuda_units().items())),
            "",
            "| unit | sm | head dim | tile (rows x keys) | warps | stages | CTAs/SM | variant | registers | spill bytes | shared KiB | runs on |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def read_code(text: str) -> dict[str, str]:
    """The hashes of the units' code in a table written by this script."""
    return dict(re.findall(r"^- (\S+): `\w+`, code `(\w+)`$", text, re.MULTILINE))


def carry(report: dict[str, Any], before: str, after: str) -> list[str]:
    """Units of reports/gpu-check.json whose code is the same in two tables while their sources changed: their GPU
    results hold, and the report names their new digests. ``carried`` there names the old ones."""
    old, new = read_table(before)[0], read_table(after)[0]
    old_code, new_code = read_code(before), read_code(after)
    same = {
        unit: new[unit]
        for unit, value in report["units"].items()
        if unit in new and value == old.get(unit) != new[unit] and old_code.get(unit) == new_code[unit]
    }
    runs = [report, *report.get("parts", {}).values()]
    for judged in [r[key] for r in runs for key in ("units", "judged", "library") if key in r]:
        judged.update({u: v for u, v in same.items() if judged.get(u) == old[u]})
    for unit in same:
        report.setdefault("carried", {})[unit] = old[unit]
    return list(same)


def read_table(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Digests and rows of a table written by this script."""
    digests = dict(re.findall(r"^- (\S+): `(\w+)`", text, re.MULTILINE))
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return digests, [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update reports/resources.md")
    parser.add_argument("--all", action="store_true", help="compile every unit, changed or not")
    parser.add_argument("--arch", type=int, action="append", help="80, 90, ... (default: all)")
    options = parser.parse_args(arguments)
    kept: list[str] = []
    before: dict[str, str] = {}
    written, code = "", {}
    if TABLE.is_file() and not options.all and not options.arch:
        written = TABLE.read_text(encoding="utf-8")
        before, code = read_table(written)[0], read_code(written)
        kept = [line for line in written.splitlines() if re.match(r"\| sm\d+/", line)]
    now = digest.cuda_units()
    changed = [u.removeprefix("cuda/") for u in now if before.get(u) != now[u]]
    current = {u.removeprefix("cuda/") for u in now} - set(changed)
    kept = [line for line in kept if line.split(" | ")[0].removeprefix("| ") in current]
    kernels, made = collect(changed, tuple(options.arch or ARCHS))
    rows = sorted(kept + rows_of(kernels), key=lambda line: line.split(" | ")[0])
    text = table(rows, {**code, **made})
    if options.write:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text, encoding="utf-8")
        report = json.loads(REPORT.read_text(encoding="utf-8"))
        same = carry(report, written, text)
        if same:
            records.write(REPORT, report)
            print(f"of the same code, so that {REPORT.name} still holds: {', '.join(same)}")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
