"""The installed stand-in modules and metadata, through which code that imports flash_attn gets flashsci.

A finder at the head of ``sys.meta_path`` makes the modules when they are first imported. Each of them is a package
with an empty search path, so that a name it lacks is looked up as a submodule too, and the finder can name the
provider.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module, metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VERSION = "2.8.3+flashsci"  # of the interface; the part after the plus names the provider
VERSION_3 = "3.0.0b1+flashsci"

_HERE = __package__
_FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_STEPS = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
)
# Module: the source of its names, and the names.
_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "flash_attn": {f"{_HERE}.fa2": _FUNCTIONS},
    "flash_attn.flash_attn_interface": {f"{_HERE}.fa2": _FUNCTIONS, f"{_HERE}.steps": _STEPS},
    "flash_attn.bert_padding": {
        f"{_HERE}.padding": (
            "index_first_axis",
            "index_first_axis_residual",
            "index_put_first_axis",
            "pad_input",
            "unpad_input",
            "unpad_input_for_concatenated_sequences",
        )
    },
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {
        f"{_HERE}.rotary": (
            "RotaryEmbedding",
            "apply_rotary",
            "apply_rotary_emb",
            "apply_rotary_emb_func",
            "apply_rotary_emb_kv_",
            "apply_rotary_emb_qkv_",
            "apply_rotary_emb_torch",
            "rotate_half",
        )
    },
    "flash_attn.modules": {},
    "flash_attn.modules.mha": {
        f"{_HERE}.mha": ("MHA", "LinearResidual", "_update_kv_cache"),
        f"{_HERE}.inner": (
            "CrossAttention",
            "FlashCrossAttention",
            "FlashSelfAttention",
            "SelfAttention",
            "get_alibi_slopes",
        ),
        f"{_HERE}.rotary": ("RotaryEmbedding",),
        f"{_HERE}.fa2": _FUNCTIONS,
    },
    "flash_attn.utils": {},
    "flash_attn.utils.generation": {f"{_HERE}.mha": ("InferenceParams",)},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.rotary": {f"{_HERE}.rotary": ("apply_rotary",)},
    "flash_attn_interface": {
        f"{_HERE}.fa3": (
            "flash_attn_func",
            "flash_attn_qkvpacked_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
        )
    },
}
# Top-level module: its distribution and version.
_DISTRIBUTIONS = {
    "flash_attn": ("flash-attn", VERSION),
    "flash_attn_interface": ("flash-attn-3", VERSION_3),
}


# Modules of flash_attn from which programs import functions of einops.
_WITH_EINOPS = ("flash_attn.bert_padding", "flash_attn.layers.rotary", "flash_attn.modules.mha")
# Parts of flash_attn other than attention, by the name of a module or of a name in it: the alternative.
_INSTEAD = {
    "flash_attn.flash_attention": "flash_attn.modules.mha has MHA and FlashSelfAttention; FlashMHA was version 1's",
    "flash_attn.flash_attn_triton": "flashsci.attention(bias=...) has a bias with a gradient",
    "flash_attn.flash_attn_unpadded_func": "it is flash_attn_varlen_func since version 2",
    "flash_attn.flash_attn_unpadded_kvpacked_func": "it is flash_attn_varlen_kvpacked_func since version 2",
    "flash_attn.flash_attn_unpadded_qkvpacked_func": "it is flash_attn_varlen_qkvpacked_func since version 2",
    "flash_attn.cute": "flash_attn has the functions of version 2, flash_attn_interface those of version 3",
    "flash_attn.layers.patch_embed": "use torch.nn.Conv2d with stride = kernel_size",
    "flash_attn.losses": "use torch.nn.CrossEntropyLoss",
    "flash_attn.models": "build the model from transformers, with attn_implementation='flash_attention_2'",
    "flash_attn.modules.block": "write the block over flash_attn.modules.mha.MHA and torch.nn.LayerNorm",
    "flash_attn.modules.embedding": "use torch.nn.Embedding",
    "flash_attn.modules.mha.ParallelMHA": "shard MHA by torch.distributed.tensor.parallel",
    "flash_attn.modules.mlp": "use torch.nn.Linear and torch.nn.functional.gelu or silu",
    "flash_attn.ops.activations": "use torch.nn.functional",
    "flash_attn.ops.fused_dense": "use torch.nn.Linear",
    "flash_attn.ops.layer_norm": "use torch.nn.LayerNorm",
    "flash_attn.ops.rms_norm": "use torch.nn.RMSNorm",
    "flash_attn.ops.triton.cross_entropy": "use torch.nn.functional.cross_entropy",
    "flash_attn.ops.triton.k_activations": "use torch.nn.functional",
    "flash_attn.ops.triton.layer_norm": "use torch.nn.LayerNorm or torch.nn.RMSNorm",
    "flash_attn.ops.triton.linear": "use torch.nn.functional.linear",
    "flash_attn.ops.triton.mlp": "use torch.nn.functional.linear",
    "flash_attn.utils.benchmark": "use torch.utils.benchmark",
    "flash_attn.utils.distributed": "use torch.distributed",
    "flash_attn.utils.pretrained": "use transformers' from_pretrained",
}


class _Metadata(metadata.Distribution):
    """The metadata of a stand-in for `importlib.metadata`: its name and version, and that flashsci provides it."""

    def __init__(self, module: str):
        self.module = module

    def read_text(self, filename: str) -> str | None:
        name, version = _DISTRIBUTIONS[self.module]
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: flashsci's stand-in for {self.module}, in this process\n",
            "top_level.txt": f"{self.module}\n",
            "INSTALLER": "flashsci\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"flashsci's stand-in for {self.module} has no files: {path}")


class _Finder(metadata.DistributionFinder, Loader):
    """Finds and makes the stand-in modules of the top-level modules ``tops``, and finds their metadata."""

    def __init__(self) -> None:
        self.tops: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.tops:
            return None
        if fullname in _MODULES:
            spec = ModuleSpec(fullname, self, origin=__file__, is_package=True)
            spec.has_location = True  # module.__file__ names the provider
            return spec
        parent, _, name = fullname.rpartition(".")
        if parent in _MODULES:
            raise ModuleNotFoundError(_lacks(parent, name))
        return None

    def exec_module(self, module: ModuleType) -> None:
        for home, names in _MODULES[module.__name__].items():
            source = import_module(home)
            vars(module).update({name: getattr(source, name) for name in names})
        vars(module)["__getattr__"] = partial(_missing, module.__name__)
        if module.__name__ == "flash_attn":
            vars(module)["__version__"] = VERSION

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        asked = None if context is None else context.name
        for module, (name, _) in _DISTRIBUTIONS.items():
            if module not in self.tops:
                continue
            if asked is None or re.sub(r"[-_.]+", "-", asked).lower() == name:
                yield _Metadata(module)


def _lacks(module: str, name: str) -> str:
    names = (n for names in _MODULES[module].values() for n in names if not n.startswith("_wrapped"))
    inner = (m for m in _MODULES if m.rpartition(".")[0] == module)
    advice = _INSTEAD.get(f"{module}.{name}")
    there = ", ".join([*names, *inner])
    return f"flashsci's stand-in for {module} lacks {name!r}; it has {there}" + (
        f". Instead: {advice}" if advice else ""
    )


def _missing(module: str, name: str) -> Any:
    if name in ("rearrange", "repeat") and module in _WITH_EINOPS and find_spec("einops"):
        return getattr(import_module("einops"), name)
    if f"{module}.{name}" in _MODULES:
        return import_module(f"{module}.{name}")
    raise AttributeError(_lacks(module, name), name=name, obj=sys.modules.get(module))


_finder = _Finder()


def install(fa3: bool = False) -> None:
    """Make ``import flash_attn`` give flashsci's stand-in from now on, in this process; with ``fa3`` also
    ``flash_attn_interface``.

    Call it before anything imports them, or asks whether they exist: in the first lines of a program. Further calls
    are allowed, and add modules that were not asked for before. An installed flash_attn is hidden until
    :func:`uninstall`.

    Args:
        fa3: also stand in for FlashAttention-3. Programs that find both prefer it, and then do without features that
            it lacks (ALiBi, dropout); the kernels behind both are the same. Therefore use it only for programs that
            know FlashAttention-3 alone.

    Raises:
        RuntimeError: the real module has been imported already.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn import install, uninstall
        >>> install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'flashsci.compat.flash_attn.fa2'
        >>> uninstall()
    """
    tops = set(_DISTRIBUTIONS) if fa3 else {"flash_attn"}
    for name in sorted(tops):
        module = sys.modules.get(name)
        if module is not None and not _ours(module):
            raise RuntimeError(
                f"{name} is imported already, from {getattr(module, '__file__', None)}: call "
                "flashsci.compat.flash_attn.install() before anything imports it, in the first lines of the program"
            )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if not tops <= _finder.tops:
        _finder.tops |= tops
        _tell_transformers()


def uninstall() -> None:
    """Undo every :func:`install`: the next import finds the real modules, or none. Modules that are imported already
    stay."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if _finder.tops:
        _finder.tops.clear()
        for name in [name for name, module in sys.modules.items() if _ours(module)]:
            del sys.modules[name]
        _tell_transformers()


def _ours(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader", None) is _finder


def _tell_transformers() -> None:
    """Make transformers look again for distributions, if it is imported: it looks only once, when it is imported."""
    utilities = sys.modules.get("transformers.utils.import_utils")
    if utilities is None:
        return
    known: dict[str, list[str]] | None = getattr(utilities, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if known is not None:
        found = metadata.packages_distributions()
        for name in _DISTRIBUTIONS:
            known.pop(name, None)
            if name in found:
                known[name] = list(found[name])
    checks: Iterable[Callable[..., Any]] = (
        check for name, check in vars(utilities).items() if name.startswith("is_flash_attn")
    )
    for check in checks:
        if hasattr(check, "cache_clear"):
            check.cache_clear()
