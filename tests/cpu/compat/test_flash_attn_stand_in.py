"""Code that imports flash_attn and knows nothing of flashsci runs through it, as long as the stand-in is installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

import flashsci.compat.flash_attn as compat
from flashsci.compat.flash_attn import fa2, stand_in

CLIENT = """
import flash_attn
from flash_attn import (
    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache,
)
from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func as same
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward
from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention, flash_attn_varlen_kvpacked_func
from flash_attn.utils.generation import InferenceParams
import flash_attn_interface
from flash_attn_interface import flash_attn_func as flash_attn_3

class Layer:
    def __init__(self, dim):
        self.rotary = RotaryEmbedding(dim)

    def __call__(self, qkv, mask):
        batch, seq = mask.shape
        qkv = self.rotary(qkv)
        rows, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
        out = flash_attn_varlen_qkvpacked_func(rows, cu_seqlens, longest, causal=True)
        return pad_input(out, indices, batch, seq)
"""


@pytest.fixture
def installed():
    compat.install(fa3=True)
    yield
    compat.uninstall()


@pytest.fixture
def client(installed, tmp_path, monkeypatch):
    """A module that imports flash_attn after it was installed."""
    (tmp_path / "some_client.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("some_client")
    del sys.modules["some_client"]


def test_client(client):
    """Padding to the right, where the rotation of a padded batch is that of the packed one."""
    assert client.same is client.flash_attn_varlen_qkvpacked_func is fa2.flash_attn_varlen_qkvpacked_func
    qkv = torch.randn(2, 6, 3, 4, 8)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    found = client.Layer(8)(qkv.clone(), mask)
    rotated = client.RotaryEmbedding(8)(qkv)
    expected = client.flash_attn_qkvpacked_func(rotated, causal=True)
    torch.testing.assert_close(found, expected * mask[..., None, None], rtol=1e-5, atol=1e-6)


def test_versions(installed):
    import flash_attn
    from packaging.version import Version

    assert Version(flash_attn.__version__).release == (2, 8, 3)
    assert Version(flash_attn.__version__).local == "flashsci", "the version says whose it is"
    assert importlib.metadata.version("flash_attn") == flash_attn.__version__
    assert importlib.metadata.version("flash-attn") == flash_attn.__version__
    assert Version(importlib.metadata.version("flash-attn-3")).major == 3
    found = importlib.metadata.packages_distributions()
    assert found["flash_attn"][0] == "flash-attn"
    assert found["flash_attn_interface"][0] == "flash-attn-3"
    distribution = importlib.metadata.distribution("flash_attn")
    assert "flashsci" in distribution.metadata["Summary"]
    assert distribution.read_text("INSTALLER").strip() == "flashsci" and not distribution.files
    with pytest.raises(FileNotFoundError, match="no files"):
        distribution.locate_file("flash_attn/__init__.py")


def test_found_before_and_after_import(installed):
    for _ in range(2):
        spec = importlib.util.find_spec("flash_attn")
        assert spec is not None and "flashsci" in spec.origin
        import flash_attn
    assert "flashsci" in flash_attn.__file__
    assert importlib.util.find_spec("flash_attn.bert_padding") is not None
    assert flash_attn.bert_padding is sys.modules["flash_attn.bert_padding"], "without an import"


@pytest.mark.parametrize(
    "code, error, module, name",
    [
        ("from flash_attn import flash_attn_unpadded_func", ImportError, "flash_attn", "flash_attn_unpadded_func"),
        ("import flash_attn.losses.cross_entropy", ImportError, "flash_attn", "losses"),
        ("from flash_attn.flash_attention import FlashMHA", ImportError, "flash_attn", "flash_attention"),
        ("from flash_attn.ops.triton.layer_norm import x", ImportError, "flash_attn.ops.triton", "layer_norm"),
        ("from flash_attn.bert_padding import x", ImportError, "flash_attn.bert_padding", "x"),
        ("from flash_attn_interface import get_scheduler_metadata", ImportError, "flash_attn_interface", "get_scheduler_metadata"),
        ("import flash_attn; flash_attn.x", AttributeError, "flash_attn", "x"),
        ("import flash_attn.layers.rotary as r; r.rotate_all", AttributeError, "flash_attn.layers.rotary", "rotate_all"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(installed, code, error, module, name):
    with pytest.raises(error, match=f"flashsci's stand-in for {module} lacks '{name}'; it has "):
        exec(code, {})
    import flash_attn

    assert not hasattr(flash_attn, "x") and getattr(flash_attn, "x", 7) == 7


@pytest.mark.parametrize(
    "code, advice",
    [
        ("from flash_attn.ops.fused_dense import FusedDense", "use torch.nn.Linear"),
        ("from flash_attn.ops.triton.layer_norm import RMSNorm", "torch.nn.RMSNorm"),
        ("from flash_attn.losses.cross_entropy import CrossEntropyLoss", "torch.nn.CrossEntropyLoss"),
        ("from flash_attn.modules.mlp import GatedMlp", "torch.nn.Linear"),
        ("from flash_attn.modules.block import Block", "MHA"),
        ("from flash_attn.modules.mha import ParallelMHA", "tensor.parallel"),
        ("from flash_attn.models.bert import BertModel", "transformers"),
        ("from flash_attn import flash_attn_unpadded_func", "flash_attn_varlen_func since version 2"),
        ("from flash_attn.flash_attention import FlashMHA", "flash_attn.modules.mha"),
    ],
)
def test_a_replacement_is_named(installed, code, advice):
    with pytest.raises(ImportError, match=f"Instead: .*{advice}"):
        exec(code, {})


@pytest.mark.parametrize("order", [(False, True), (True, False), (True,), (False,)])
def test_version_3_only_where_it_is_asked_for(order):
    """A program that prefers FlashAttention-3 where it can be imported must not meet it unasked."""
    try:
        for fa3 in order:
            compat.install(fa3=fa3)
        assert importlib.util.find_spec("flash_attn") is not None
        found = importlib.util.find_spec("flash_attn_interface") is not None
        assert found == any(order)
        assert ("flash_attn_interface" in importlib.metadata.packages_distributions()) == found
    finally:
        compat.uninstall()
    assert importlib.util.find_spec("flash_attn") is importlib.util.find_spec("flash_attn_interface") is None


def test_a_real_version_3_stays_where_it_was_not_asked_for(monkeypatch):
    real = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", real)
    compat.install()
    try:
        import flash_attn_interface

        assert flash_attn_interface is real
    finally:
        compat.uninstall()


@pytest.mark.parametrize("module", ["bert_padding", "layers.rotary", "modules.mha"])
def test_functions_of_einops(installed, module, monkeypatch):
    """flash_attn imports them, and programs import them from it."""
    there = ModuleType("einops")
    there.rearrange = there.repeat = lambda x, *_: x
    there.__spec__ = importlib.machinery.ModuleSpec("einops", None)
    monkeypatch.setitem(sys.modules, "einops", there)
    found = {}
    exec(f"from flash_attn.{module} import rearrange, repeat", found)
    assert found["rearrange"] is there.rearrange
    monkeypatch.setitem(sys.modules, "einops", None)
    monkeypatch.setattr(stand_in, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="lacks 'rearrange'"):
        exec(f"from flash_attn.{module} import rearrange", {})


def test_install_again_and_uninstall():
    before = list(sys.meta_path)
    compat.install()
    import flash_attn

    compat.install()
    import flash_attn as again

    assert again is flash_attn and len(sys.meta_path) == len(before) + 1
    compat.uninstall()
    compat.uninstall()
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    assert callable(flash_attn.flash_attn_func), "what was imported stays"
    compat.install()
    import flash_attn as later

    assert later is not flash_attn
    compat.uninstall()


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
def test_a_real_package_is_not_replaced_once_imported(name, monkeypatch):
    real = ModuleType(name)
    real.__file__ = "/somewhere/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, name, real)
    before = list(sys.meta_path)
    with pytest.raises(RuntimeError, match=rf"{name} is imported already, from /somewhere.* first lines"):
        compat.install(fa3=True)
    assert sys.modules[name] is real and sys.meta_path == before


def test_a_real_package_that_is_not_imported_comes_back(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True\n")
    information = tmp_path / "flash_attn-2.7.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.7.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    compat.install()
    import flash_attn

    assert flash_attn.flash_attn_func is fa2.flash_attn_func
    assert importlib.metadata.version("flash_attn").endswith("+flashsci")
    compat.uninstall()
    assert importlib.metadata.version("flash_attn") == "2.7.0"
    try:
        assert importlib.import_module("flash_attn").real
    finally:
        sys.modules.pop("flash_attn", None)


def test_absent_after_uninstall(installed):
    compat.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


# transformers, with nothing changed but its question whether there is a CUDA device


@pytest.fixture
def transformers(monkeypatch):
    """transformers, imported before the stand-in was installed, and told that the CPU will do."""
    module = pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
                 "_unpad_fn", "_process_flash_kwargs_fn"):  # fmt: skip
        monkeypatch.setattr(flash, name, getattr(flash, name))
    two = dict(flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2])
    monkeypatch.setitem(
        flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX, 2, two | {"supported_devices": ((lambda: True, "cpu"),)}
    )
    assert not import_utils.is_flash_attn_2_available()
    compat.install()
    assert import_utils.is_flash_attn_2_available() and not import_utils.is_flash_attn_3_available()
    compat.install(fa3=True)
    assert import_utils.is_flash_attn_2_available() and import_utils.is_flash_attn_3_available()
    assert not import_utils.is_flash_attn_4_available()
    assert import_utils.is_flash_attn_greater_or_equal("2.6.3")
    yield module
    compat.uninstall()
    assert not import_utils.is_flash_attn_2_available()
    assert "flash_attn" not in import_utils.PACKAGE_DISTRIBUTION_MAPPING


def models(transformers, name, **options):
    """The same random weights with eager attention and with flash_attention_2."""
    both = []
    for implementation in ("eager", "flash_attention_2"):
        config = getattr(transformers, f"{name}Config")(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=50, max_position_embeddings=64, pad_token_id=0, dtype="float32", **options,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForCausalLM")
        both.append(model._from_config(config, attn_implementation=implementation).eval())
    both[1].load_state_dict(both[0].state_dict())
    assert [m.config._attn_implementation for m in both] == ["eager", "flash_attention_2"]
    return both


def counted(monkeypatch):
    """The calls of flash_attn's functions that reach flashsci."""
    calls = []
    for name in ("attention", "varlen_attention"):
        function = getattr(fa2, name)
        monkeypatch.setattr(fa2, name, lambda *a, f=function, n=name, **o: calls.append(n) or f(*a, **o))
    return calls


@pytest.mark.parametrize(
    "name, options",
    [("Llama", {}), ("Mistral", dict(sliding_window=3)), ("Gemma2", dict(head_dim=8, sliding_window=4))],
    ids=["Llama", "Mistral, window", "Gemma-2, softcap"],
)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_transformers_logits_and_gradients(transformers, monkeypatch, padding, name, options):
    ids, mask = torch.randint(1, 50, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    if padding != "none":
        mask[0, slice(0, 4) if padding == "left" else slice(5, 9)] = 0
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    calls, logits, gradients = counted(monkeypatch), [], []
    for model in models(transformers, name, **options):
        out = model(ids, attention_mask=mask, position_ids=position).logits[mask.bool()]
        out.square().sum().backward()
        logits.append(out.detach())
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert calls == ["attention" if padding == "none" else "varlen_attention"] * 2
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_transformers_packed_and_generated(transformers, monkeypatch):
    eager, flash = models(transformers, "Llama")
    ids, mask = torch.randint(1, 50, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    calls = counted(monkeypatch)
    written = [m.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False) for m in (eager, flash)]
    assert torch.equal(*written) and calls.count("varlen_attention") == 2 * 4
    row = ids.reshape(1, -1)
    position = torch.cat((torch.arange(6), torch.arange(6)))[None]
    apart = eager(ids).logits.reshape(1, 12, -1)
    found = flash(row, position_ids=position, use_cache=False).logits
    torch.testing.assert_close(found, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_transformers_imported_after_install(tmp_path):
    """The other order, in a process of its own."""
    pytest.importorskip("transformers")
    import subprocess

    program = tmp_path / "program.py"
    program.write_text(
        "from flashsci.compat import flash_attn\n"
        "flash_attn.install()\n"
        "from transformers.utils import import_utils\n"
        "import_utils.is_torch_cuda_available = lambda: True\n"
        "assert import_utils.is_flash_attn_2_available()\n"
        "from transformers.modeling_flash_attention_utils import lazy_import_flash_attention\n"
        "functions, _ = lazy_import_flash_attention('flash_attention_2')\n"
        "assert all(f.__module__.startswith('flashsci.') for f in functions)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
