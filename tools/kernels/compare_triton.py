"""A comparison of two trees' Triton kernels: PTX, SASS, registers, spills, shared memory. Needs no GPU.

    python tools/kernels/compare_triton.py record base.json --tree ../base   compile a list of calls with the kernels of a tree
    python tools/kernels/compare_triton.py record new.json                   ... of this one
    python tools/kernels/compare_triton.py compare base.json new.json        what differs; exits with 1 where something got worse

`record` runs the launches of forward, backward, jvp and double backward for every call of `calls()` up to Triton's
own launch, which is replaced by a compilation for sm_80 and sm_90 (`--arch`). A kernel is identified by call,
operation and its index there, so that kernels and files may be renamed between the trees. PTX is compared without
comments, names and line information. If it differs, SASS is compared, without addresses and the places of
parameters in constant memory. If that differs, too, the operations of the innermost loops as Triton lowered them
(TTGIR) are compared, in no order: they may be the same with another schedule.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECOND_ORDER = ("jvp", "many_jvp", "second_jvp", "double_backward", "many_double_backward")
OPERATIONS = ("forward", "backward", "many_backward", *SECOND_ORDER)
FIRST_ORDER = ("forward", "backward")
MEASURES = ("registers", "stack", "shared")  # spills live on the stack


def calls(architecture: int):
    """(name, dtype, (D, Dv), options, operations) of calls that, together, take every branch of the kernels."""
    main = "bfloat16"
    pair, shared, keys, queries = (2, 4, 300, 300), (1, 4, 300, 300), (2, 1, 1, 300), (2, 4, 300, 1)
    short, tiny = {"seq": (31, 30)}, {"seq": (60, 64)}
    causal, window = {"window_right": 0}, {"window_left": 40, "window_right": 8}
    for dtype, precision in ((main, "default"), ("float32", "default"), ("float32", "tf32"), ("float32", "ieee")):
        for dims in (32, 64, 128) if precision != "ieee" else (64,):
            yield f"{dtype} {precision} d{dims}", dtype, (dims, dims), {"precision": precision}, FIRST_ORDER
    yield "float16 d64", "float16", (64, 64), {}, OPERATIONS
    yield "d256", main, (256, 256), {}, FIRST_ORDER
    yield "two chunks", main, (80, 48), {}, OPERATIONS
    yield "two chunks, causal", main, (96, 96), causal, FIRST_ORDER
    yield "two chunks, bias", main, (80, 80), {"bias": pair, "dropout_p": 0.1}, FIRST_ORDER
    yield "two chunks, shared bias", main, (80, 48), {"bias": shared}, OPERATIONS
    yield "two chunks, fp32", "float32", (96, 40), {}, FIRST_ORDER
    yield "two chunks, short", main, (48, 24), short, OPERATIONS
    yield "unaligned rows", "float16", (25, 37), {}, FIRST_ORDER
    yield "causal", main, (64, 64), causal, FIRST_ORDER
    yield "causal d128", main, (128, 128), causal, FIRST_ORDER
    yield "window", main, (64, 64), window, OPERATIONS
    yield "softcap", main, (64, 64), {"softcap": 15.0}, FIRST_ORDER
    yield "negative scale", main, (64, 64), {"scale": -0.125}, FIRST_ORDER
    yield "lse gradient", main, (64, 64), {"dlse": True}, FIRST_ORDER
    yield "only dq", main, (64, 64), {"need": 1}, ("backward",)
    yield "only dk", main, (64, 64), {"need": 2}, ("backward",)
    yield "only dv", main, (64, 64), {"need": 4}, ("backward",)
    for name, shape in (("pair", pair), ("shared", shared), ("keys", keys), ("queries", queries)):
        yield f"bias of {name}", main, (64, 64), {"bias": shape}, OPERATIONS if name == "pair" else FIRST_ORDER
    yield "bias of pair, d128", main, (128, 128), {"bias": pair} | causal, FIRST_ORDER
    yield "bias of pair, fp32", "float32", (64, 64), {"bias": pair}, FIRST_ORDER
    yield "transposed bias", main, (64, 64), {"bias": pair, "bias_transposed": True}, FIRST_ORDER
    yield "mask of pairs", main, (64, 64), {"mask": pair}, FIRST_ORDER
    yield "mask of keys", main, (64, 64), {"mask": keys}, FIRST_ORDER
    yield "tiles of a mask", main, (64, 64), {"mask": pair, "tiles": True} | causal, OPERATIONS
    yield "tiles of a mask of keys", main, (64, 64), {"mask": keys, "tiles": True}, OPERATIONS
    yield "everything", main, (64, 64), {"bias": shared, "mask": keys, "weight": (2, 2, 300), "softcap": 9.0, "dropout_p": 0.2, "dlse": True} | window, OPERATIONS  # fmt: skip
    yield "weights", main, (64, 64), {"weight": (2, 2, 300)}, OPERATIONS
    yield "weights of 16 bits", main, (128, 128), {"weight": (2, 2, 300), "narrow_weight": True} | causal, OPERATIONS
    yield "alibi", main, (64, 64), {"alibi": (2, 4)} | causal, OPERATIONS
    yield "dropout", main, (64, 64), {"dropout_p": 0.1}, FIRST_ORDER
    yield "packed", main, (64, 64), {"packed": True} | causal, OPERATIONS
    yield "packed, bias of keys", main, (64, 64), {"packed": True, "bias": "keys"}, FIRST_ORDER
    yield "packed, bias of pairs", main, (64, 64), {"packed": True, "bias": "ragged"}, FIRST_ORDER
    yield "packed, shared bias", main, (64, 64), {"packed": True, "bias": "shared"}, OPERATIONS
    yield "short", main, (32, 32), short, FIRST_ORDER
    yield "short, fp32", "float32", (32, 32), short | {"bias": (2, 4, 31, 30)}, OPERATIONS
    yield "short, d64", main, (64, 64), tiny | {"dlse": True}, FIRST_ORDER
    yield "short, bias of keys", main, (32, 32), short | {"bias": (2, 1, 1, 30), "weight": (2, 2, 30)}, FIRST_ORDER
    yield "short, bias of queries", main, (32, 32), short | {"bias": (2, 4, 31, 1), "softcap": 9.0}, FIRST_ORDER
    yield "short, packed", main, (32, 32), {"packed": True, "longest": 30, "dropout_p": 0.1}, OPERATIONS
    yield "short, packed, bias of pairs", main, (32, 32), {"packed": True, "longest": 30, "bias": "ragged"}, FIRST_ORDER
    wide = {"seq": (40, 36), "heads_k": 4}
    yield "wide, short", "float32", (320, 64), wide | {"dlse": True}, OPERATIONS
    yield "wide, short, unaligned", "float32", (129, 131), wide | {"dropout_p": 0.1, "softcap": 9.0}, FIRST_ORDER
    yield "wide, short, bias", "float32", (256, 256), wide | {"bias": (2, 4, 40, 36), "weight": (2, 4, 36)}, OPERATIONS
    yield "wide, short, bias of keys", "float32", (320, 64), {"seq": (40, 36), "bias": (2, 1, 1, 36)}, FIRST_ORDER
    yield "wide, few queries", "float32", (256, 256), {"seq": (9, 36), "heads_k": 4}, OPERATIONS
    if architecture == 90:
        yield "d512", main, (512, 512), {}, FIRST_ORDER
        yield "d192", main, (192, 128), causal, FIRST_ORDER


def arguments(torch, dtype, dims, options) -> dict[str, tuple]:
    """Arguments of the raw ops for one call, by operation."""
    from flashsci.call.ops import Scalars, Tensors

    dtype, (head_dim, head_dim_v) = getattr(torch, dtype), dims
    packed = options.get("packed", False)
    lead = () if packed else (2,)
    seq_q, seq_k = options.get("seq", (300, 300))
    q = torch.zeros(*lead, 4, seq_q, head_dim, dtype=dtype)
    heads_k = options.get("heads_k", 2)
    k = torch.zeros(*lead, heads_k, seq_k, head_dim, dtype=dtype)
    v = torch.zeros(*lead, heads_k, seq_k, head_dim_v, dtype=dtype)
    bias = weight = mask = cu = offsets = seed = slopes = table = None
    longest = options.get("longest", -1)
    if packed:
        cu = torch.tensor([0, *range(20, 300, 20), 300], dtype=torch.int32)
    if options.get("bias") in ("ragged", "shared"):
        offsets = torch.tensor([0, *range(400, 6400, 400)])
        bias = torch.zeros(4 if options["bias"] == "ragged" else 1, 6000, dtype=dtype)
    elif options.get("bias") == "keys":
        bias = torch.zeros(4, 1, seq_k, dtype=dtype)
    elif options.get("bias"):
        bias = torch.zeros(options["bias"], dtype=dtype)
        bias = bias.mT.contiguous().mT if options.get("bias_transposed") else bias
    if options.get("weight"):
        weight = torch.zeros(options["weight"], dtype=dtype if options.get("narrow_weight") else torch.float32)
    if options.get("mask"):
        mask = torch.ones(options["mask"], dtype=torch.bool)
    if options.get("dropout_p"):
        seed = torch.zeros(2, dtype=torch.int64)
    if options.get("alibi"):
        slopes = torch.zeros(options["alibi"])
    if options.get("tiles") and "mask_tiles" in Tensors._fields:  # an older tree has none
        from flashsci.call.mask_tiles import table_length

        table = torch.zeros(*mask.shape[:-2], 1, table_length(*mask.shape[-2:]), dtype=torch.int32)
    out = torch.zeros(*q.shape[:-1], head_dim_v, dtype=dtype)
    lse = torch.zeros(q.shape[:-1])
    scalars = (longest, longest, options.get("scale", 0.125), options.get("softcap", 0.0), options.get("window_left", -1),
               options.get("window_right", -1), False, options.get("dropout_p", 0.0), options.get("precision", "default"), False, False)  # fmt: skip
    tensors = (q, k, v, bias, weight, mask, cu, cu, offsets, seed, slopes, table)
    tensors = tensors[: len(Tensors._fields)]  # an older tree has fewer
    scalars = scalars[: len(Scalars._fields)]
    given = (*tensors, out, lse, *scalars)
    dlse = lse if options.get("dlse") else None
    tangents = (q, k, v, bias, weight)
    several = tuple(None if x is None else x.expand(4, *x.shape) for x in tangents)
    pulled = tuple(None if x is None else x.expand(4, *x.shape) for x in (out, dlse))
    return {
        "forward": (*tensors, *scalars),
        "backward": (out, dlse, *given, options.get("need", 31)),
        "many_backward": (*pulled, *given, options.get("need", 31)),
        "jvp": (*tangents, *given),
        "many_jvp": (*several, *given),
        "second_jvp": (*tangents, *tangents, *tangents, lse, lse, *given),
        "double_backward": (*tangents, out, lse, *given, 127),
        "many_double_backward": (*several, out, lse, *given, 127),
    }


def recorder(architecture: int) -> tuple[dict, list]:
    """The raw Triton ops by name, as for a device of this architecture, and the list of their launches: (kernel,
    arguments, options). For a process that does nothing else: Triton's own launch is replaced."""
    import torch
    from triton.runtime import jit

    from flashsci.call import ops

    found: dict = {}
    launched: list = []

    def define(backend, what, kernel, keys):
        found[f"{backend}_{what}"] = lambda *flat: kernel(*ops.PASSES[what].grouped(*flat))

    ops.define = define
    import flashsci.backends.triton  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("flashsci.backends.triton") and hasattr(module, "device_of"):
            kind = type(module.device_of(torch.device("cpu")))
            device = kind(0, divmod(architecture, 10), 50 << 20, 132)
            module.device_of = lambda _, device=device: device

    def run(self, *args, grid, warmup, **options):
        launched.append((self, args, options))

    jit.JITFunction.run = run
    return found, launched


def launches(architecture: int):
    """(key, kernel, arguments, options) of everything that the calls launch."""
    import torch

    import flashsci

    found, launched = recorder(architecture)
    for name, dtype, dims, options, operations in calls(architecture):
        given = arguments(torch, dtype, dims, options)
        for operation in operations:
            launched.clear()
            if f"triton_{operation}" in found and given[operation] is not None:  # an older tree has fewer
                if operation == "second_jvp":
                    from flashsci.backends.triton.plans.second_jvp import has_kernel

                    if not has_kernel(getattr(torch, dtype), max(dims)):
                        continue
                with contextlib.suppress(flashsci.BackendError):  # those of many directions, where these share nothing
                    found[f"triton_{operation}"](*given[operation])
            for place, launch in enumerate(launched):
                yield f"sm_{architecture} | {name} | {operation} {place}", *launch


def described(kernel, args, options, target):
    """The source and options that Triton itself would compile for this launch."""
    from triton.compiler import ASTSource
    from triton.runtime import driver

    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))
    options = options | {"debug": False}
    _, _, _, backend, binder = kernel.create_binder()
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, *binder(*args, **options))
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__


def normal_ptx(ptx: str, name: str) -> str:
    """PTX without comments, debug sections and text that depends on the kernel's name."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"\.section\s+\.debug.*?\n\t?\}", "", ptx, flags=re.S).replace(name, "kernel")
    lines = (" ".join(line.split()) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp")))


def normal_sass(sass: str) -> str:
    """Instructions without addresses and without the places of parameters in constant memory."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", sass)
    return "\n".join(re.sub(r"c\[0x0\]\s*\[0x[0-9a-f]+\]", "c[0x0][]", " ".join(line.split())) for line in lines)


def loop_operations(ttgir: str) -> str:
    """The operations of every innermost loop, with their layouts, in no order: the computation, without its
    schedule."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, flags=re.M))
    lines, found = ttgir.splitlines(), []
    for first, line in enumerate(lines):
        if "scf.for" not in line and "scf.while" not in line:
            continue
        indent = line[: len(line) - len(line.lstrip())]
        last = next(i for i in range(first + 1, len(lines)) if lines[i].startswith(indent + "}"))
        body = lines[first + 1 : last]
        if not any("scf.for" in x or "scf.while" in x for x in body):
            plain = (re.sub(r"%[\w:#]+", "%", re.sub(r" loc\(.*\)$", "", x)).strip() for x in body)
            inlined = (re.sub(r"#\w+", lambda m: layouts.get(m[0], m[0]), x) for x in plain)
            found.append("\n".join(sorted(inlined)))
    return "\n\n".join(sorted(found))


def compile_launch(kernel, args, options, architecture: int):
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", architecture, 32)
    source, options = described(kernel, args, options, target)
    return triton.compile(source, target=target, options=options)


def compile_one(kernel, args, options, architecture: int) -> dict:
    import triton

    from flashsci.check.machine_code import undefined_in

    compiled = compile_launch(kernel, args, options, architecture)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: E731
        usage = run(str(tools / "cuobjdump"), "--dump-resource-usage", file.name)
        sass = normal_sass(run(str(tools / "cuobjdump"), "-sass", file.name))
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = normal_ptx(compiled.asm["ptx"], compiled.metadata.name)
    loops = loop_operations(compiled.asm["ttgir"])
    return {
        "kernel": kernel.__name__,
        "ptx": hashlib.sha256(ptx.encode()).hexdigest()[:16],
        "sass": hashlib.sha256(sass.encode()).hexdigest()[:16],
        "loops": hashlib.sha256(loops.encode()).hexdigest()[:16],
        "instructions": sass.count("\n") + 1,
        "registers": used["REG"],
        "stack": used["STACK"] + used["LOCAL"],
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "undefined": [f"{f.register}: {f.instruction}" for f in undefined_in(compiled.asm["cubin"])],
    }


def record_part(tree: Path, architecture: int, part: int, parts: int, only: str) -> dict:
    """Every `parts`-th launch from the `part`-th on, in a process that imports the tree's package."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, sys.path)])
    command = [sys.executable, __file__, "part", str(architecture), str(part), str(parts), only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if done.returncode:
        raise SystemExit(done.stderr[-6000:])
    return json.loads(done.stdout.splitlines()[-1])


def compile_part(architecture: int, part: int, parts: int, only: str) -> dict:
    known: dict = {}
    found = {}
    for place, (key, kernel, args, options) in enumerate(launches(architecture)):
        if place % parts != part or not re.search(only, key):
            continue
        same = (kernel.__name__, str(args), str(options))
        if same not in known:
            known[same] = compile_one(kernel, args, options, architecture)
        found[key] = known[same]
        print(key, found[key], file=sys.stderr, flush=True)
    return found


def record(path: Path, tree: Path, architectures: list[int], jobs: int, only: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = [
            pool.submit(record_part, tree, architecture, part, jobs, only)
            for architecture in architectures
            for part in range(jobs)
        ]
        found = {key: value for part in parts for key, value in part.result().items()}
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} launches in {path}")


def compare(before: dict, after: dict) -> int:
    """Print the differences; returns 1 if a kernel needs more registers, stack or shared memory, or is missing."""
    counts: dict = collections.defaultdict(collections.Counter)
    rows, worse = [], 0
    for key in before:
        old, new = before[key], after.get(key)
        if new is None:
            rows.append(f"| {key.replace(' | ', ', ')} | {old['kernel']} | missing | | | | |")
            worse = 1
            continue
        kind = next((k for k in ("ptx", "sass", "loops") if old[k] == new[k]), "no")
        counts[new["kernel"]][kind] += 1
        if kind in ("loops", "no"):
            change = [f"{old[m]} -> {new[m]}" if old[m] != new[m] else f"{old[m]}" for m in ("instructions", *MEASURES)]
            rows.append(f"| {key.replace(' | ', ', ')} | {new['kernel']} | {kind} | {' | '.join(change)} |")
            worse |= any(new[m] > old[m] for m in MEASURES)
    print("| kernel | launches | same PTX | same SASS but for parameters | same operations in loops | different |")
    print("|---|---|---|---|---|---|")
    for kernel, kinds in sorted(counts.items()):
        each = (str(kinds[kind]) for kind in ("ptx", "sass", "loops", "no"))
        print(f"| {kernel} | {kinds.total()} | {' | '.join(each)} |")
    if rows:
        print("\n| call | kernel | same | instructions | registers | stack bytes | shared bytes |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(rows))
    if new_keys := [key for key in after if key not in before]:
        print(f"\nOnly after: {', '.join(new_keys)}")
    return int(worse)


def main() -> int:
    if sys.argv[1:2] == ["part"]:
        architecture, part, parts = map(int, sys.argv[2:5])
        print(json.dumps(compile_part(architecture, part, parts, sys.argv[5])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="compile the kernels of a tree")
    one.add_argument("path", type=Path)
    one.add_argument("--tree", type=Path, default=ROOT)
    one.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    one.add_argument("--jobs", type=int, default=os.cpu_count())
    one.add_argument("--only", default="", help="regular expression: part of the calls")
    two = commands.add_parser("compare", help="compare two recordings")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.path, options.tree.resolve(), options.arch, options.jobs, options.only)
        return 0
    return compare(*(json.loads(p.read_text(encoding="utf-8")) for p in (options.before, options.after)))


if __name__ == "__main__":
    sys.exit(main())
