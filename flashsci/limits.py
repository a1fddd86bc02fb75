"""The known limits by GPU generation and by version: the page docs/limits.md, and the lines of ``python -m flashsci env``.

This module imports the standard library alone, as the report on a broken machine does.
"""

from __future__ import annotations

from typing import NamedTuple

from flashsci.versions import NEWEST, TESTED, series

Pair = tuple[int, int]
#: Compute capabilities on which `check` and the tests have run the kernels.
CHECKED: frozenset[Pair] = frozenset({(9, 0)})


class Gpu(NamedTuple):
    """The limits of one kind of GPU."""

    first: Pair  # compute capabilities from this one ...
    last: Pair  # ... to this one
    name: str
    code: str  # the machine code that a wheel has for it
    limits: tuple[str, ...]


class Fault(NamedTuple):
    """A fault of torch or Triton, and how flashsci avoids it."""

    package: str
    versions: str  # in which it was seen
    before: Pair | None  # releases from this one on are without it; None: not known
    gpu: bool  # whether it concerns machines with a GPU alone
    text: str
    link: str = ""
    since: Pair = (0, 0)  # releases before this one are without it


_UNTIMED = "Nothing has been timed on it. `auto` follows rules and tiles that were measured on an H200."
_NEVER_RUN = "No kernel of flashsci has run on it. The first call checks each family of kernels there once."
_WIDE_FP32 = "The backward of fp32 with head dims above 128 is refused by `cuda`: its tiles need more shared memory. `triton` serves it."
_EIGHT_ON_HOPPER = "The kernel of `cuda` on 8-bit floats is for Hopper. `triton` serves such calls."
_EIGHT_BITS = "8-bit floats are refused: it has no instructions for them."

GPUS = (
    Gpu(
        (7, 5),
        (7, 9),
        "Turing: T4, RTX 20",
        "sm_75",
        (
            "`cuda` has fp16 alone, to head dim 256, and 128 in the backward. fp32 is served by `triton`.",
            "bf16 is refused: it has no instructions for it.",
            _EIGHT_BITS,
            "The paged kernels of `cuda` begin at sm_80; `triton` serves such calls.",
            "Its kernels have been checked on Hopper alone.",
            _NEVER_RUN,
            _UNTIMED,
        ),
    ),
    Gpu((8, 0), (8, 0), "Ampere: A100, A30", "sm_80", (_EIGHT_BITS, _WIDE_FP32, _NEVER_RUN, _UNTIMED)),
    Gpu(
        (8, 6),
        (8, 8),
        "Ampere: A10, A40, RTX 30, Orin",
        "sm_80, which runs there",
        (_EIGHT_BITS, _WIDE_FP32, _NEVER_RUN, _UNTIMED),
    ),
    Gpu(
        (8, 9),
        (8, 9),
        "Ada: L4, L40, RTX 40",
        "sm_80, which runs there",
        (_EIGHT_ON_HOPPER, _WIDE_FP32, _NEVER_RUN, _UNTIMED),
    ),
    Gpu((9, 0), (9, 0), "Hopper: H100, H200", "sm_90a, and sm_90 of Ampere's kernels", ("Timed on an H200 alone.",)),
    Gpu(
        (10, 0),
        (10, 9),
        "Blackwell: B200, B300",
        "sm_100 of Ampere's kernels",
        (
            "No kernel uses its tensor memory. For dense calls in 16 bits cuDNN and FlashAttention-4 are faster.",
            _EIGHT_ON_HOPPER,
            _NEVER_RUN,
            _UNTIMED,
        ),
    ),
    Gpu(
        (11, 0),
        (11, 9),
        "Blackwell: Thor",
        "PTX of Ampere's kernels, which the driver compiles at the first call",
        (_EIGHT_ON_HOPPER, _WIDE_FP32, _NEVER_RUN, _UNTIMED),
    ),
    Gpu(
        (12, 0),
        (12, 9),
        "Blackwell: RTX 50, RTX PRO, Spark",
        "sm_120 of Ampere's kernels",
        (
            _WIDE_FP32,
            _EIGHT_ON_HOPPER,
            _NEVER_RUN,
            _UNTIMED,
        ),
    ),
)

FAULTS = (
    Fault(
        "torch",
        "2.10",
        (2, 11),
        True,
        "`activate_flash_attention_impl` activates a name once in a process. `handle.activate()` does it again.",
    ),
    Fault(
        "torch",
        "2.11",
        None,
        False,
        "Forward mode over forward mode of a negated view, such as the imaginary part of a conjugate, ends in an assertion inside of "
        "torch: give `x.resolve_neg()`.",
    ),
    Fault(
        "torch",
        "2.13",
        None,
        False,
        "The kernel of `scaled_dot_product_attention` for CPUs masks before it scales: a scale of 0 or less gives NaN under a "
        "mask. The `sdpa` backend gives it the mask as numbers.",
    ),
    Fault(
        "torch",
        "2.13",
        None,
        False,
        "Inductor's code for products of 64-bit integers gives other numbers on CPUs. The mask of dropout is an op of its own "
        "in compiled programs.",
    ),
    Fault(
        "torch",
        "2.11",
        None,
        True,
        "cuDNN's backward gives NaN for some masked shapes. The `sdpa` backend leaves cuDNN out where a call has a mask or a bias.",
        "https://github.com/pytorch/pytorch/issues/196678",
    ),
    Fault(
        "torch",
        "2.11",
        (2, 13),
        False,
        "AOTInductor loses the results of any op that takes bfloat16 as a dtype: attention on 8-bit floats with bfloat16 results "
        "gives None there.",
    ),
    Fault(
        "torch",
        "2.11",
        None,
        True,
        "A process that loads a package of AOTInductor on a GPU ends with a segmentation fault, also where the package holds a "
        "plain matrix product. Seen with torch 2.11.0+cu130; newer ones were not tried on a GPU.",
    ),
    Fault(
        "torch",
        "2.11",
        (2, 13),
        False,
        "The compiler takes no context that sets a value inside a checkpoint: put `use_backend` around the compiled call.",
    ),
    Fault(
        "torch",
        "2.11",
        None,
        True,
        "The fuser of TorchScript has no 8-bit floats on a GPU: a traced `quantize` raises there. Compile it by `torch.compile`. "
        "Newer releases were not tried on a GPU.",
    ),
    Fault(
        "torch",
        "2.13",
        None,
        False,
        "A thread of gloo may end a process with an abort after a collective. flashsci waits for its own collectives at the "
        "end of a process.",
        "https://github.com/pytorch/pytorch/pull/179291",
    ),
    Fault(
        "triton",
        "3.6",
        None,
        True,
        "A mask, dropout and TF32 products together are compiled into wrong code for head dims above 128 on sm_90. flashsci uses "
        "IEEE products there.",
    ),
    Fault(
        "triton",
        "3.6",
        None,
        True,
        "Its ptxas (12.8) loses the address of an operand in shared memory where tiles are not loaded ahead. flashsci chooses "
        "other tiles, and `check` searches the machine code for the fault.",
    ),
    Fault(
        "triton",
        "3.6",
        None,
        True,
        "A tile that both kinds of tensor-core instructions read gets one buffer too few. flashsci takes one stage there.",
    ),
    Fault(
        "triton",
        "3.9",
        None,
        True,
        "Some kernels keep registers in memory, for which tiles were chosen under 3.6: 8-bit floats with head dim 128 on "
        "sm_89, residual attention in IEEE fp32 on sm_90. That costs speed, which nobody has measured.",
        since=(3, 9),
    ),
)


def of_gpu(capability: Pair) -> Gpu | None:
    """The kind of a GPU; None of one that is older or unknown."""
    return next((gpu for gpu in GPUS if gpu.first <= capability <= gpu.last), None)


def about_gpu(capability: Pair) -> list[str]:
    """The limits of a GPU, a line each."""
    known = of_gpu(capability)
    name = f"sm_{capability[0]}{capability[1]}"
    if known is None and capability < GPUS[0].first:
        return [f"{name} is older than sm_75, the oldest that kernels here serve; `auto` takes torch's own"]
    if known is None:
        return [f"{name} is newer than every GPU that flashsci knows. {_NEVER_RUN}"]
    return list(known.limits)


def about_version(package: str, version: str, gpu: bool = True) -> list[str]:
    """The known faults of a release of torch or Triton, a line each; ``gpu``: whether the machine has one."""
    release = series(version)
    present = (
        f for f in FAULTS if f.package == package and f.since <= release and (not f.before or release < f.before)
    )
    return [f.text for f in present if gpu or not f.gpu]


def page() -> str:
    """The page docs/limits.md."""
    torch, triton = (".".join(map(str, NEWEST[name])) for name in ("torch", "triton"))
    lines = [
        "# Known limits",
        "",
        "`python -m flashsci backends --write` writes this page, and `python -m flashsci env` prints what concerns the machine at",
        "hand. [The table of features](results/features.md) has the refusals by feature.",
        "",
        "## By GPU",
        "",
        "`triton` compiles for the GPU at hand. A wheel has machine code of `cuda` for these:",
        "",
        "| GPU | compute capability | machine code |",
        "|---|---|---|",
    ]
    for gpu in GPUS:
        ends = [".".join(map(str, x)) for x in (gpu.first, gpu.last)]
        where = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
        lines.append(f"| {gpu.name} | {where} | {gpu.code} |")
    for gpu in GPUS:
        lines += ["", f"### {gpu.name}", "", *(f"- {text}" for text in gpu.limits)]
    lines += [
        "",
        "AMD, Intel and Apple GPUs have `reference` and `sdpa` alone.",
        "",
        "## The first call on a GPU",
        "",
        "Where no kernel of flashsci has run on a kind of GPU, the first call that `cuda` serves there compares one small problem of",
        "each family of its kernels with fp64. This takes less than a second, once per machine. A family that fails is",
        "named in a warning; please report it. `FLASHSCI_FIRST_CHECK=0` in the environment leaves the check out. Its outcome is",
        "kept in `~/.cache/flashsci`, under `XDG_CACHE_HOME`, or in the folder `FLASHSCI_CACHE`. `python -m flashsci check` examines everything, in minutes.",
        "",
        "## By version",
        "",
        f"The tests run under torch {series(TESTED[0][0])[0]}.{series(TESTED[0][0])[1]} to {torch} and Triton "
        f"{min(series(t) for _, t in TESTED)[0]}.{min(series(t) for _, t in TESTED)[1]} to {triton}:",
        "",
        "| torch | Triton |",
        "|---|---|",
        *(f"| {pair[0]} | {pair[1]} |" for pair in TESTED),
        "",
        "A newer torch or Triton is named in a warning at the first use. These faults of theirs are known, and avoided if not said otherwise:",
        "",
        "| package | seen in | fault |",
        "|---|---|---|",
    ]
    for fault in FAULTS:
        link = f" [Report]({fault.link})" if fault.link else ""
        lines.append(f"| {fault.package} | {fault.versions} | {fault.text}{link} |")
    return "\n".join([*lines, ""])
