"""No argument of a drop-in function is taken and then ignored: a value that asks for something changes what comes back, or raises,
or is listed here as one on which results do not depend."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from flashsci.compat import cuequivariance, deepspeed, jvp_flash_attention, xformers
from flashsci.compat.flash_attn import fa2, fa3, inner, mha, padding, rotary, steps

INT = torch.int32
torch.manual_seed(7)
Q, K, V = torch.randn(3, 2, 6, 4, 8)
ROWS = [x.flatten(0, 1) for x in (Q, K, V)]
QKV, KV = torch.stack((Q, K, V), 2), torch.stack((K, V), 2)
CU = torch.tensor([0, 6, 12], dtype=INT)
CACHES = torch.randn(2, 2, 9, 4, 8)
NEW = dict(k=K[:, :2], v=V[:, :2], cache_seqlens=4)
ANGLES = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.3]))
TABLES = dict(rotary_cos=ANGLES.cos(), rotary_sin=ANGLES.sin())
TABLE = torch.tensor([[0, 1], [1, 0]], dtype=INT)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.7])
ONES = torch.ones(2, 4)
FP32 = torch.float32
X = torch.randn(2, 6, 32)
PAIRS = torch.randn(2, 1, 4, 6, 6)
FIVE = [torch.randn(2, 3, 4, 6, 8) for _ in range(3)]

# How the work is divided or laid out, bounds that may be larger than needed, checks.
PLANS = {
    "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "deterministic", "max_seqlen_q", "max_seqlen_k", "max_seqlen",
    "return_softmax", "warp_specialize", "USE_TMA", "verify_attn_mask", "fused_bias_fc", "checkpointing",
}  # fmt: skip

COMMON = dict(softmax_scale=0.7, causal=True, window_size=(1, 1), softcap=0.5, return_attn_probs=True)
TWO = COMMON | dict(dropout_p=0.5, alibi_slopes=SLOPES)
THREE = COMMON | dict(qv=Q, q_descale=ONES, k_descale=ONES, v_descale=ONES, attention_chunk=2)
CACHED = dict(
    softmax_scale=0.7, causal=True, window_size=(1, 1), softcap=0.5, return_softmax_lse=True, cache_seqlens=3,
    cache_batch_idx=torch.tensor([1, 0]), cache_leftpad=torch.tensor([1, 2], dtype=INT),
    k=(dict(v=V[:, :2], cache_seqlens=4), K[:, :2]), v=(dict(k=K[:, :2], cache_seqlens=4), V[:, :2]),
    rotary_cos=(NEW | TABLES | dict(rotary_cos=None), TABLES["rotary_cos"]),
    rotary_sin=(NEW | TABLES | dict(rotary_sin=None), TABLES["rotary_sin"]),
    rotary_interleaved=(NEW | TABLES | dict(causal=True), False),
)  # fmt: skip

# Function: positional arguments, and for every argument with a default a value that asks for something. A tuple is (keyword
# arguments that the value needs beside it, value) and perhaps other positional arguments.
CALLS = {
    fa2.flash_attn_func: ((Q, K, V), TWO),
    fa2.flash_attn_kvpacked_func: ((Q, KV), TWO),
    fa2.flash_attn_qkvpacked_func: ((QKV,), TWO),
    fa2.flash_attn_varlen_func: ((*ROWS, CU, CU, 6, 6), TWO | dict(block_table=TABLE)),
    fa2.flash_attn_varlen_kvpacked_func: ((ROWS[0], KV.flatten(0, 1), CU, CU, 6, 6), TWO),
    fa2.flash_attn_varlen_qkvpacked_func: ((QKV.flatten(0, 1), CU, 6), TWO),
    fa2.flash_attn_with_kvcache: (
        (Q[:, :2], *CACHES),
        CACHED | dict(alibi_slopes=SLOPES, block_table=TABLE),
    ),
    fa3.flash_attn_func: ((Q, K, V), THREE),
    fa3.flash_attn_qkvpacked_func: (
        (QKV,),
        {n: x for n, x in THREE.items() if n != "qv"} | dict(num_heads_q=3),
    ),
    fa3.flash_attn_varlen_func: (
        (*ROWS, CU, CU, 6, 6),
        THREE | dict(seqused_q=torch.tensor([2, 6], dtype=INT), seqused_k=torch.tensor([2, 6], dtype=INT)),
    ),
    fa3.flash_attn_with_kvcache: (
        (Q[:, :2], *CACHES),
        CACHED | dict(
            qv=Q[:, :2], page_table=TABLE, q_descale=ONES, k_descale=ONES, v_descale=ONES, attention_chunk=2,
            cu_seqlens_q=CU, cu_seqlens_k_new=(NEW, CU),
            rotary_seqlens=(NEW | TABLES | dict(causal=True), torch.tensor([7, 0], dtype=INT)),
        ),
    ),
    steps._flash_attn_varlen_forward: (
        (*ROWS, CU, CU, 6, 6, 0.0, None, False),
        dict(
            window_size_left=1, window_size_right=1, softcap=0.5, alibi_slopes=SLOPES, block_table=TABLE,
            leftpad_k=torch.tensor([1, 0], dtype=INT), seqused_k=torch.tensor([3, 6], dtype=INT), zero_tensors=True,
        ),
    ),
    rotary.apply_rotary: (
        (Q, ANGLES.cos(), ANGLES.sin()),
        dict(seqlen_offsets=2, cu_seqlens=CU, interleaved=True, conjugate=True, inplace=True),
    ),
    rotary.apply_rotary_emb: (
        (Q, ANGLES.cos(), ANGLES.sin()),
        dict(seqlen_offsets=2, cu_seqlens=CU, interleaved=True, inplace=True),
    ),
    rotary.apply_rotary_emb_torch: ((Q, ANGLES[:6].cos(), ANGLES[:6].sin()), dict(interleaved=True)),
    rotary.rotate_half: ((Q,), dict(interleaved=True)),
    rotary.apply_rotary_emb_qkv_: (
        (QKV, ANGLES.cos(), ANGLES.sin()),
        dict(cos_k=ANGLES.sin(), sin_k=ANGLES.cos(), interleaved=True, seqlen_offsets=2, num_heads_q=3),
    ),
    rotary.apply_rotary_emb_kv_: (
        (KV, ANGLES.cos(), ANGLES.sin()), dict(interleaved=True, seqlen_offsets=2),
    ),
    padding.unpad_input: (
        (X, torch.tensor([[1, 1, 0, 0, 0, 0]] * 2)), dict(unused_mask=torch.tensor([[0, 0, 1, 0, 0, 0]] * 2)),
    ),
    inner.FlashSelfAttention.forward: (
        (inner.FlashSelfAttention(), QKV), dict(causal=True, cu_seqlens=CU),
    ),
    inner.FlashCrossAttention.forward: (
        (inner.FlashCrossAttention(), Q, KV),
        dict(causal=True, cu_seqlens=CU, cu_seqlens_k=(dict(cu_seqlens=CU), CU, (inner.FlashCrossAttention(), ROWS[0], KV.flatten(0, 1)))),
    ),
    inner.SelfAttention.forward: (
        (inner.SelfAttention(), QKV), dict(causal=True, key_padding_mask=torch.tensor([[True] * 3 + [False] * 3] * 2)),
    ),
    inner.CrossAttention.forward: (
        (inner.CrossAttention(), Q, KV),
        dict(causal=True, key_padding_mask=torch.tensor([[True] * 3 + [False] * 3] * 2)),
    ),
    mha.MHA.forward: (
        (mha.MHA(32, 4), X),
        dict(x_kv=X, key_padding_mask=torch.tensor([[True] * 3 + [False] * 3] * 2), cu_seqlens=CU, mixer_subset=[0],
             inference_params=mha.InferenceParams(8, 2)),
    ),
    jvp_flash_attention.attention: (
        (Q, K, V),
        dict(attn_mask=torch.randn(4, 4), dropout_p=0.5, causal=True, sm_scale=0.7),
    ),
    jvp_flash_attention.attention_jvp: (
        (Q, K, V, Q, K, V),
        dict(attn_mask=torch.randn(4, 4), causal=True, sm_scale=0.7, backend="no such backend"),
    ),
    cuequivariance.triangle_attention: (
        (*FIVE, PAIRS),
        dict(mask=torch.rand(2, 3, 1, 1, 6) < 0.5, scale=0.7, return_aux=True, kv_lengths=torch.full((2, 3, 1, 1, 1), 2, dtype=INT)),
    ),
    xformers.merge_attentions: (
        (torch.stack((Q, K)), torch.randn(2, 2, 4, 6)), dict(write_lse=False, output_dtype=torch.float64),
    ),
    deepspeed.DS4Sci_EvoformerAttention: (([x.transpose(2, 3) for x in FIVE] + [[None, PAIRS]]), dict()),
}  # fmt: skip
for _function in (
    xformers.memory_efficient_attention,
    xformers.memory_efficient_attention_forward,
    xformers.memory_efficient_attention_forward_requires_grad,
):
    CALLS[_function] = (
        (Q, K, V),
        dict(attn_bias=torch.randn(2, 4, 6, 6), p=0.5, scale=0.7, op="some operator", output_dtype=torch.float64),
    )


def flat(x):
    """What a call returned, and whether it is one of the arguments, as something to compare."""
    if isinstance(x, (tuple, list)):
        return [y for item in x for y in [len(x), *flat(item)]]
    return [x]


def same(a, b):
    a, b = flat(a), flat(b)
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        else x is y or (type(x) is type(y) and not isinstance(x, torch.Tensor) and x == y)
        for x, y in zip(a, b, strict=True)
    )


def fresh(x):
    """Arguments of a call that may write into them."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, (tuple, list)):
        return type(x)(fresh(y) for y in x)
    return x


def outcome(function, positional, keywords):
    """What came back and what was written, or the error."""
    torch.manual_seed(3)
    arguments, keywords = fresh(list(positional)), {n: fresh(x) for n, x in keywords.items()}
    try:
        found = function(*arguments, **keywords)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        assert type(error) is not TypeError or "unexpected keyword" not in str(error)
        return [type(error).__name__]
    if function is steps._flash_attn_varlen_forward:
        found = found[:3]  # the state of random numbers that nobody draws is memory as it was
    kept = [x for x in arguments if isinstance(x, torch.Tensor)]
    return [found, kept]


PROBES = [(f, name) for f, (_, values) in CALLS.items() for name in values]


@pytest.mark.parametrize("function, name", PROBES, ids=lambda x: getattr(x, "__qualname__", x))
def test_a_value_that_asks_for_something_is_heard(function, name):
    positional, values = CALLS[function]
    value = values[name]
    beside = {}
    if isinstance(value, tuple) and isinstance(value[0], dict):
        beside, value, *other = value
        positional = other[0] if other else positional
    neutral = outcome(function, positional, beside)
    assert not same(outcome(function, positional, beside | {name: value}), neutral)
    default = inspect.signature(function).parameters[name].default
    assert same(
        outcome(function, positional, beside | {name: default}),
        outcome(function, positional, {n: x for n, x in beside.items() if n != name}),
    )


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__qualname__)
def test_every_argument_is_probed(function):
    kinds = inspect.signature(function).parameters.values()
    optional = {p.name for p in kinds if p.default is not p.empty}
    assert optional - set(CALLS[function][1]) <= PLANS
    assert isinstance(outcome(function, CALLS[function][0], {})[0], (torch.Tensor, tuple)), "the plain call works"


def test_every_function_is_probed():
    """What a program can import from a drop-in, but for functions whose arguments have no defaults."""
    found = set()
    for module in (cuequivariance, deepspeed, jvp_flash_attention, xformers, fa2, fa3, steps, rotary, padding):
        for name, x in vars(module).items():
            ours = inspect.isfunction(x) and x.__module__ == module.__name__
            public = not name.startswith("_") or name.startswith("_flash_attn")
            if ours and public and any(p.default is not p.empty for p in inspect.signature(x).parameters.values()):
                found.add(x)
    backward = {x for x in found if "backward" in x.__name__}  # gradients: judged by tests of the steps
    assert found - backward <= set(CALLS), found - backward - set(CALLS)


CONSTRUCTORS = dict(
    num_heads_kv=2, cross_attn=True, qkv_proj_bias=False, out_proj_bias=False, dropout=0.5, softmax_scale=0.7, causal=True,
    dwconv=True, rotary_emb_dim=8, return_residual=True, dtype=torch.float64,
    rotary_emb_base=(dict(rotary_emb_dim=8), 10.0), rotary_emb_scale_base=(dict(rotary_emb_dim=8), 4.0),
    rotary_emb_interleaved=(dict(rotary_emb_dim=8), True), use_alibi=(dict(use_flash_attn=True), True),
    window_size=(dict(use_flash_attn=True), (1, 1)),
)  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_argument_of_mha_is_heard(name):
    value, beside = CONSTRUCTORS[name], {}
    if isinstance(value, tuple) and isinstance(value[0], dict):
        beside, value = value

    def run(options):
        torch.manual_seed(3)
        module = mha.MHA(32, 4, **options)
        for p in module.parameters():
            nn.init.normal_(p, std=0.5)
        return outcome(module, (X.to(options.get("dtype", FP32)),), {})

    assert not same(run(beside | {name: value}), run(beside))
    others = {
        "layer_idx",
        "use_flash_attn",
        "device",
    }  # where a cache lies, how and where the same numbers are computed
    optional = {p.name for p in inspect.signature(mha.MHA).parameters.values() if p.default is not p.empty}
    assert optional - set(CONSTRUCTORS) <= PLANS | others


# Kinds in which the other packages take options


def one(x):
    return torch.tensor(x)


ALIKE = {
    "jvp scale": lambda k: jvp_flash_attention.attention(Q, K, V, sm_scale=k(0.5)),
    "jvp causal": lambda k: jvp_flash_attention.attention(Q, K, V, causal=k(True)),
    "jvp tangent": lambda k: jvp_flash_attention.attention_jvp(Q, K, V, Q, K, V, causal=k(1), sm_scale=k(0.5)),
    "triangle scale": lambda k: cuequivariance.triangle_attention(*FIVE, PAIRS, scale=k(0.5)),
    "triangle aux": lambda k: cuequivariance.triangle_attention(*FIVE, PAIRS, return_aux=k(1))[:2],
    "xformers scale": lambda k: xformers.memory_efficient_attention(Q, K, V, p=k(0.0), scale=k(0.5)),
    "xformers lse": lambda k: xformers.memory_efficient_attention_forward_requires_grad(Q, K, V, p=k(0.0)),
    "xformers window": lambda k: xformers.memory_efficient_attention(
        Q, K, V, xformers.LowerTriangularFromBottomRightLocalAttentionMask(k(2))
    ),
    "xformers band": lambda k: xformers.memory_efficient_attention(
        Q, K, V, xformers.LocalAttentionFromBottomRightMask(k(2), k(1))
    ),
    "xformers lengths": lambda k: xformers.memory_efficient_attention(
        Q[:1], K[:1], V[:1], xformers.BlockDiagonalCausalMask.from_seqlens(k([2, 4]))
    ),
    "xformers list": lambda k: xformers.memory_efficient_attention(
        Q[:1], K[:1], V[:1], xformers.BlockDiagonalMask.from_seqlens([k(2), k(4)], [k(1), k(5)])
    ),
    "xformers padded": lambda k: xformers.memory_efficient_attention(
        Q[:1],
        K[:1],
        V[:1],
        xformers.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 4], 3, k([2, 3])),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_tensors_and_ints_as_options(name):
    expected = ALIKE[name](lambda x: bool(x) if name in ("jvp tangent", "triangle aux") and x == 1 else x)
    assert same(ALIKE[name](one), expected)
    if name in ("jvp tangent", "triangle aux"):
        assert same(ALIKE[name](lambda x: x), expected), "an int for a flag"


def test_a_triangle_without_a_bias():
    with pytest.raises(TypeError, match=r"bias must be a tensor.*flashsci\.attention"):
        cuequivariance.triangle_attention(*FIVE, None)
