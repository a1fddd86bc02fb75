"""A whole program by flashsci: torch's function swapped for flashsci.sdpa, flash_attn's modules, torch's flash kernels and
transformers' attention entered, in any order and all at once; torch's own layers and models compute as before."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flashsci
from flashsci.compat import flash_attn as flash_attn_compat
from flashsci.integrations import torch as torch_flash

transformers = pytest.importorskip("transformers")

THEIRS = F.scaled_dot_product_attention


@contextlib.contextmanager
def function():
    """The usual swap of a whole program."""
    F.scaled_dot_product_attention = flashsci.sdpa
    try:
        yield
    finally:
        F.scaled_dot_product_attention = THEIRS


@contextlib.contextmanager
def flash_attn():
    flash_attn_compat.install()
    try:
        yield
    finally:
        flash_attn_compat.uninstall()


@contextlib.contextmanager
def kernels():
    """torch's operators of flash attention, which are for GPUs, entered for the CPU."""
    torch_flash.register()
    replaced = torch_flash.Replaced("CPU")
    try:
        yield
    finally:
        replaced.remove()


@contextlib.contextmanager
def models():
    from flashsci.integrations import transformers as integration

    integration.register()
    yield


SWAPS = {"function": function, "flash_attn": flash_attn, "kernels": kernels, "models": models}
ORDERS = [[name] for name in SWAPS] + [list(order) for order in itertools.permutations(SWAPS)]


@contextlib.contextmanager
def swapped(order):
    with contextlib.ExitStack() as stack:
        for name in order:
            stack.enter_context(SWAPS[name]())
        yield


# Models: a module, and what calls it.

B, S, E, H = 2, 9, 16, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(S)
PADDED = torch.arange(S) >= torch.tensor([[S], [S - 3]])


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def multihead(**call):
    def run(module, x):
        return module(x, x, x, **call)[0]

    return nn.MultiheadAttention(E, H, batch_first=True), run


def encoder(**call):
    layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), lambda module, x: module(x, **call)


def decoder(**call):
    layer = nn.TransformerDecoderLayer(E, H, 32, 0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 2), lambda module, x: module(x, x.flip(1), **call)


class Block(nn.Module):
    """Attention of a vision transformer, as timm and most others write it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.q_norm, self.k_norm = nn.LayerNorm(E // H), nn.LayerNorm(E // H)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=0.0)
        return x + self.proj(out.transpose(1, 2).reshape(x.shape))


SIZES = dict(vocab_size=50, hidden_size=E, intermediate_size=32, num_hidden_layers=2, num_attention_heads=H)


def language_model(kind, implementation="sdpa", **options):
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    ids = torch.randint(50, (B, S), generator=torch.Generator().manual_seed(1))
    mask = (~PADDED).long()

    def run(module, x):
        return module(input_ids=ids, attention_mask=mask).last_hidden_state[~PADDED]

    return model, run


def vision_model(implementation="sdpa"):
    config = transformers.ViTConfig(
        hidden_size=E, intermediate_size=32, num_hidden_layers=2, num_attention_heads=H, image_size=12, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    pixels = rows(B, 3, 12, 12)
    return model, lambda module, x: module(pixel_values=pixels.to(x.dtype)).last_hidden_state


def timm_model():
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=E,
        num_heads=H,
        depth=2,
        num_classes=5,
    )
    pixels = rows(B, 3, 32, 32)
    return model, lambda module, x: module(pixels.to(x.dtype))


def diffusers_model():
    processors = pytest.importorskip("diffusers.models.attention_processor", exc_type=ImportError)
    model = processors.Attention(
        E, cross_attention_dim=12, heads=H, dim_head=4, processor=processors.AttnProcessor2_0()
    )
    context = rows(B, 7, 12)
    return model, lambda module, x: module(x, encoder_hidden_states=context.to(x.dtype))


MODELS = {
    "multihead": lambda: multihead(need_weights=False),
    "multihead with weights": lambda: multihead(need_weights=True),
    "multihead, causal": lambda: multihead(need_weights=False, attn_mask=CAUSAL, is_causal=True),
    "multihead, padded": lambda: multihead(need_weights=False, key_padding_mask=PADDED),
    "multihead, float mask": lambda: multihead(need_weights=False, attn_mask=rows(B * H, S, S)),
    "encoder": encoder,
    "encoder, causal": lambda: encoder(mask=CAUSAL, is_causal=True),
    "encoder, padded": lambda: encoder(src_key_padding_mask=PADDED),
    "decoder": lambda: decoder(tgt_mask=CAUSAL, tgt_is_causal=True, memory_key_padding_mask=PADDED),
    "vision block": lambda: (Block(), lambda module, x: module(x)),
    "llama": lambda: language_model("Llama", num_key_value_heads=2),
    "bert": lambda: language_model("Bert"),
    "vit": vision_model,
    "timm": timm_model,
    "diffusers": diffusers_model,
}


def results(module, run, x, training):
    """Output and, in training, the gradients of input and parameters."""
    module = module.train(training)
    for inner in module.modules():  # entries that dropout draws are other ones for every kernel
        if isinstance(inner, nn.MultiheadAttention):
            inner.dropout = 0.0
    if not training:
        with torch.no_grad():
            return {"out": run(module, x)}
    x = x.detach().requires_grad_()
    out = run(module, x)
    leaves = {"x": x, **dict(module.named_parameters())}
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    ends = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
    return {"out": out.detach()} | {n: g for n, g in zip(leaves, ends, strict=True) if g is not None}


def judged(ours, before, truth):
    """The two-error rule on the largest errors: those of the program before the swap, twice, and roundings."""
    assert ours.keys() == before.keys()
    for name, x in ours.items():
        error, plain = (y.double().sub(truth[name]).abs().max().item() for y in (x, before[name]))
        floor = 8 * torch.finfo(x.dtype).eps * max(truth[name].abs().max().item(), 1.0)
        assert x.dtype == before[name].dtype and x.shape == before[name].shape
        assert error <= 2 * plain + floor, f"{name}: error {error:.3g}, before {plain:.3g}, floor {floor:.3g}"


@pytest.fixture
def served(monkeypatch):
    """Backends that calls of flashsci.attention went to."""
    from flashsci.choice import choose

    names = []
    honest = choose.choose

    def noted(problem, name, strict=False):
        found = honest(problem, name, strict)
        names.append(found.forward)
        return found

    monkeypatch.setattr(choose, "choose", noted)
    flashsci.call.plans.plans.clear()
    return names


FAST = ("multihead", "encoder")  # compute without torch's function in evaluation


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_as_before(name, training, served):
    for order in (
        ["function"],
        ["flash_attn", "kernels", "models", "function"],
        ["function", "models", "kernels"],
    ):
        compare(name, training, order)
    weights = name == "multihead with weights"
    fast = not training and name.startswith(FAST)
    assert weights or fast or served, "nothing went through the package"


def compare(name, training, order, dtype=torch.float32):
    torch.manual_seed(0)
    module, run = MODELS[name]()
    x = rows(B, S, E)
    with contextlib.suppress(AttributeError):
        x = rows(B, S, module.to_q.in_features)
    truth = results(copy.deepcopy(module).double(), run, x.double(), training) if _casts(name) else None
    before = results(module.to(dtype), run, x.to(dtype), training)
    with swapped(order):
        ours = results(module, run, x.to(dtype), training)
    judged(ours, before, truth or {n: y.double() for n, y in before.items()})


def _casts(name):
    """Whether its masks may stay in fp32 beside fp64."""
    return name not in ("multihead, causal", "multihead, float mask", "encoder, causal", "decoder")


@pytest.mark.every(3)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order(order):
    for name in ("multihead, padded", "vision block"):
        compare(name, True, order)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_transformers_by_either_way(name):
    """attn_implementation="sdpa" of a swapped program, and "fsci"."""
    kinds = dict(llama="Llama", bert="Bert")
    extra = dict(num_key_value_heads=2) if name == "llama" else {}

    def made(implementation):
        torch.manual_seed(0)
        if name == "vit":
            return vision_model(implementation)
        return language_model(kinds[name], implementation, **extra)

    x = rows(B, S, E)
    before = results(*made("sdpa"), x, True)
    module, run = made("sdpa")
    truth = results(module.double(), run, x.double(), True)
    for order in (["models", "function"], ["function", "models"], ["models"]):
        with swapped(order):
            for implementation in ("sdpa", "fsci"):
                judged(results(*made(implementation), x, True), before, truth)


@pytest.mark.parametrize("name", ["vision block", "multihead, padded", "decoder"])
def test_swapped_and_compiled(name):
    torch.manual_seed(0)
    module, run = MODELS[name]()
    x = rows(B, S, E)
    before = results(module, run, x, True)
    with swapped(["function"]):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: run(module, x), backend="aot_eager")
        ours = results(module, lambda _, x: compiled(x), x, True)
    judged(ours, before, {n: y.double() for n, y in before.items()})


def test_under_autocast():
    torch.manual_seed(0)
    block, x = Block(), rows(B, S, E)
    truth = results(copy.deepcopy(block).double(), lambda m, x: m(x), x.double(), True)

    def run(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    before = results(block, run, x, True)
    with swapped(["function"]):
        ours = results(block, run, x, True)
    for name, y in ours.items():
        error, plain = (z.double().sub(truth[name]).abs().max() for z in (y, before[name]))
        assert error <= 2 * plain + 8 * torch.finfo(torch.bfloat16).eps * truth[name].abs().max(), name


def test_functions_of_flash_attn_in_a_swapped_program():
    q, k, v = (rows(B, S, H, 8).bfloat16() + n for n in range(3))
    with swapped(["flash_attn", "function"]):
        from flash_attn import flash_attn_func

        out = flash_attn_func(q, k, v, causal=True)
    due = THEIRS(*(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out.float(), due, rtol=0.02, atol=0.02)
    assert F.scaled_dot_product_attention is THEIRS
