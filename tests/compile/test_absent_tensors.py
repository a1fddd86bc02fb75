"""Kernels with optional tensors, read by Triton's front end with any of them absent: the interpreter, which runs Python,
accepts values that the front end does not."""

from __future__ import annotations

import itertools

import pytest

from tests.compile.ahead_of_time import report_of, script

ARCHITECTURE = 90


def read(kernel, args, options) -> str:
    """The error of the front end for a launch; empty if it has none."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from tools.kernels.compare_triton import described

    target = GPUTarget("cuda", ARCHITECTURE, 32)
    source, options = described(kernel, args, options, target)
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def some(count: int, most: int = 12):
    """Flags of ``count`` tensors that are present: one alone, all but one, all, and two of each pair up to ``most``."""
    every = [tuple(n == i for n in range(count)) for i in range(count)]
    every += [tuple(n != i for n in range(count)) for i in range(count)] + [(True,) * count]
    pairs = [tuple(n in pair for n in range(count)) for pair in itertools.combinations(range(count), 2)]
    step = max(1, len(pairs) // most)
    return list(dict.fromkeys(every + pairs[::step]))


def given(tensors, flags):
    return [x if flag else None for x, flag in zip(tensors, flags, strict=True)]


def report(architecture: int, ops: dict, launched: list):
    import torch

    from flashsci.backends.triton.plans import laplacian
    from flashsci.backends.triton.plans.mask_tiles import mask_tiles
    from flashsci.call.laplacian_tensors import LaplacianTensors
    from tools.kernels.compare_triton import arguments

    known: dict = {}

    def found(call: str):
        for kernel, args, options in launched:
            kind = kernel.__name__, str([None if x is None else type(x) for x in args]), str(args), str(options)
            if kind not in known:
                known[kind] = read(kernel, args, options)
            yield {"call": f"{kernel.__name__}: {call}", "error": known[kind]}
        launched.clear()

    for name, features in (
        ("plain", {}),
        ("features", {"bias": (2, 4, 40, 36), "weight": (2, 2, 36), "softcap": 9.0, "dropout_p": 0.1}),
    ):
        call = arguments(torch, "float16", (32, 32), {"seq": (40, 36), **features})
        tensors = call["jvp"][:5]
        present = [i for i, x in enumerate(tensors) if x is not None]
        for flags in some(len(present)):
            tangents: list = [None] * 5
            for i, flag in zip(present, flags, strict=True):
                tangents[i] = tensors[i] if flag else None
            ops["triton_jvp"](*tangents, *call["jvp"][5:])
            yield from found(f"{name}, tangents {flags}")
            many = [None if x is None else x.expand(3, *x.shape).contiguous() for x in tangents]
            ops["triton_many_jvp"](*many, *call["jvp"][5:])
            yield from found(f"{name}, tangents {flags} along three directions")
            for dout, dlse in ((True, True), (True, False), (False, True))[: 1 if name == "features" else 3]:
                double = call["double_backward"]
                cotangents = given(double[5:7], (dout, dlse))
                ops["triton_double_backward"](*tangents, *cotangents, *double[7:])
                yield from found(f"{name}, tangents {flags}, dout {dout}, dlse {dlse}")
                ops["triton_many_double_backward"](*many, *cotangents, *double[7:])
                yield from found(f"{name}, tangents {flags} along three directions, dout {dout}, dlse {dlse}")
        pulled = [x.expand(3, *x.shape).contiguous() for x in call["double_backward"][5:7]]
        for flags in some(2 + len(present)):
            wanted = sum(1 << i for i, flag in zip(present, flags[2:], strict=True) if flag)
            if any(flags[:2]):
                ops["triton_many_backward"](*given(pulled, flags[:2]), *call["many_backward"][2:-1], wanted)
                yield from found(f"{name}, gradients {wanted} for many cotangents {flags[:2]}")
        for flags in some(3 * len(present)):
            tangents = [None] * 15
            places = [5 * direction + i for direction in range(3) for i in present]
            for place, flag in zip(places, flags, strict=True):
                tangents[place] = tensors[place % 5] if flag else None
            ops["triton_second_jvp"](*tangents, *call["second_jvp"][15:])
            yield from found(f"{name}, second tangents {flags}")
    x = torch.zeros(2, 4, 42, 16)
    jacobian = torch.zeros(3, *x.shape)
    for flags in some(6):
        moving = given([jacobian] * 3 + [x] * 3, flags)
        laplacian.compute(LaplacianTensors(x, x, x, *moving), 0.1)
        yield from found(f"Jacobians and Laplacians {flags}")
    for keys in (40, 333, 9000):
        mask_tiles(torch.ones(2, 1, 50, keys, dtype=torch.bool))
        yield from found(f"mask of {keys} keys")


@pytest.mark.slow
def test_every_pattern_is_read():
    pytest.importorskip("triton")
    found = report_of(__file__, ARCHITECTURE)
    assert len(found) > 150
    wrong = [entry for entry in found if entry["error"]]
    assert not wrong, f"{len(wrong)} of {len(found)}, such as {wrong[:3]}"


if __name__ == "__main__":
    script(report)
