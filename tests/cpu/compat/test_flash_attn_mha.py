"""flash_attn.modules.mha over flashsci: constructors and parameter names of the real module, its formulas in fp64, its caches."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch
from torch import nn

from flashsci.compat.flash_attn import mha
from flashsci.compat.flash_attn.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    InferenceParams,
    SelfAttention,
    get_alibi_slopes,
)

# Of the sources of flash_attn 2.8.3.
RECORDED = """
MHA.__init__(self, embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False, window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=False, return_residual=False, checkpointing=False, device=None, dtype=None)
MHA.forward(self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, mixer_subset=None, inference_params=None, **kwargs)
MHA.allocate_inference_cache(self, batch_size, max_seqlen, dtype=None)
FlashSelfAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), alibi_slopes=None, deterministic=False)
FlashSelfAttention.forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None)
FlashCrossAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0, alibi_slopes=None, window_size=(-1, -1), deterministic=False)
FlashCrossAttention.forward(self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None)
SelfAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0)
SelfAttention.forward(self, qkv, causal=None, key_padding_mask=None)
CrossAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0)
CrossAttention.forward(self, q, kv, causal=None, key_padding_mask=None)
LinearResidual.forward(self, input)
_update_kv_cache(kv, inference_params, layer_idx)
get_alibi_slopes(nheads)
"""
B, S, HEADS, DIM = 2, 6, 4, 8
WIDE = torch.float64


@pytest.mark.parametrize("recorded", RECORDED.split("\n")[1:-1], ids=lambda line: line.partition("(")[0])
def test_signatures(recorded):
    found = mha
    for name in recorded.partition("(")[0].split("."):
        found = getattr(found, name)
    signature = inspect.signature(found)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    signature = signature.replace(parameters=plain, return_annotation=signature.empty)
    assert recorded.partition("(")[0] + str(signature) == recorded


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 20])
def test_slopes(heads):
    """Of a power of two n: 2^(-8 i / n); of another number those of the power below, then every second one of the power above."""
    found = get_alibi_slopes(heads)
    below = 2 ** (heads.bit_length() - 1)
    expected = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    expected += [2 ** (-8 * i / (2 * below)) for i in range(1, 2 * below + 1, 2)]
    assert found == pytest.approx(expected[:heads], rel=1e-14)


def formula(q, k, v, causal=False, window=(-1, -1), keys=None, slopes=None, scale=None):
    """[B, S, H, D] by the definition, lower right; keys [B, Sk] bool."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * torch.einsum("bihd,bjhd->bhij", q, k)
    if slopes is not None:
        scores = scores - slopes.to(scores)[:, None, None] * (i - j).abs()
    right = 0 if causal else window[1]
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if window[0] >= 0:
        hidden |= j < i - window[0]
    if right >= 0:
        hidden |= j > i + right
    if keys is not None:
        hidden = hidden | ~keys[:, None, None]
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def rotated(x, interleaved=False, first=0, base=10000.0):
    half = x.shape[-1] // 2
    angles = torch.outer(first + torch.arange(x.shape[1]).double(), base ** (-torch.arange(half).double() / half))
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones(()).double(), angles)[:, None]
    return torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)


def layer(**options):
    torch.manual_seed(1)
    return MHA(HEADS * DIM, HEADS, dtype=WIDE, **options)


def same(out, expected, leaves, tolerance=1e-10):
    """out and the gradients of leaves."""
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    dout = torch.randn_like(expected)
    found, truth = (torch.autograd.grad(x, leaves, dout, retain_graph=True) for x in (out, expected))
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


SELF = {
    "plain": dict(),
    "flash": dict(use_flash_attn=True),
    "causal": dict(causal=True, softmax_scale=0.3),
    "flash-causal": dict(use_flash_attn=True, causal=True, softmax_scale=0.3),
    "window": dict(use_flash_attn=True, causal=True, window_size=(2, 0)),
    "alibi": dict(use_flash_attn=True, causal=True, use_alibi=True),
    "rotary": dict(rotary_emb_dim=DIM, causal=True),
    "flash-rotary": dict(rotary_emb_dim=DIM, use_flash_attn=True, rotary_emb_interleaved=True),
    "no-bias": dict(qkv_proj_bias=False, out_proj_bias=False),
    "checkpointed": dict(checkpointing=True, use_flash_attn=True, causal=True, rotary_emb_dim=DIM),
    "checkpointed-plain": dict(checkpointing=True),
    "residual": dict(return_residual=True),
    "dwconv": dict(dwconv=True, causal=True),
    "fused": dict(fused_bias_fc=True),
}


@pytest.mark.parametrize("heads_k", [HEADS, 2, 1])
@pytest.mark.parametrize("name", SELF)
def test_self_attention(name, heads_k):
    options = SELF[name]
    module = layer(num_heads_kv=heads_k, **options)
    x = torch.randn(B, S, HEADS * DIM, dtype=WIDE, requires_grad=True)
    qkv = nn.functional.linear(x, module.Wqkv.weight, module.Wqkv.bias)
    if options.get("dwconv"):
        convolutions = [module.dwconv_qkv] if heads_k == HEADS else [module.dwconv_q, module.dwconv_kv]
        weight, bias = (torch.cat([getattr(c, n) for c in convolutions]) for n in ("weight", "bias"))
        before = nn.functional.pad(qkv, (0, 0, 2, 0))
        qkv = bias + sum(weight[:, 0, t] * before[:, t : t + S] for t in range(3))
    q, k, v = qkv.unflatten(-1, (-1, DIM)).split((HEADS, heads_k, heads_k), 2)
    if options.get("rotary_emb_dim"):
        q, k = (rotated(y, options.get("rotary_emb_interleaved", False)) for y in (q, k))
    slopes = torch.tensor(get_alibi_slopes(HEADS)) if options.get("use_alibi") else None
    context = formula(
        q,
        k,
        v,
        options.get("causal", False),
        options.get("window_size", (-1, -1)),
        slopes=slopes,
        scale=options.get("softmax_scale"),
    ).flatten(-2)
    expected = nn.functional.linear(context, module.out_proj.weight, module.out_proj.bias)
    out = module(x)
    if options.get("return_residual"):
        out, residual = out
        assert residual is x
    # Tables of angles are float32.
    same(out, expected, [x, *module.parameters()], 1e-5 if options.get("rotary_emb_dim") else 1e-10)


def test_names_of_parameters():
    def names(**options):
        return " ".join(sorted(MHA(32, 4, **options).state_dict()))

    projections = "Wqkv.bias Wqkv.weight {}out_proj.bias out_proj.weight"
    rotary = dict(use_flash_attn=True, rotary_emb_dim=8, use_alibi=True)
    assert names() == names(**rotary) == names(return_residual=True) == projections.format("")
    assert names(cross_attn=True) == "Wkv.bias Wkv.weight Wq.bias Wq.weight out_proj.bias out_proj.weight"
    assert names(dwconv=True) == projections.format("dwconv_qkv.bias dwconv_qkv.weight ")
    both = "dwconv_kv.bias dwconv_kv.weight dwconv_q.bias dwconv_q.weight "
    assert names(dwconv=True, num_heads_kv=2) == projections.format(both)
    assert MHA(32, 4, num_heads_kv=2).Wqkv.weight.shape == (64, 32)
    assert MHA(32, 4, num_heads_kv=2, cross_attn=True).Wkv.weight.shape == (32, 32)


@pytest.mark.parametrize(
    "options", [dict(), dict(use_flash_attn=True, causal=True, num_heads_kv=2), dict(return_residual=True)], ids=str
)
@pytest.mark.parametrize("subset", [None, slice(0, 2)], ids=str)
@pytest.mark.parametrize("other", [False, True])
def test_cross_attention(options, subset, other):
    module = layer(cross_attn=True, **options)
    x = torch.randn(B, S, HEADS * DIM, dtype=WIDE, requires_grad=True)
    x_kv = torch.randn(B, 9, HEADS * DIM, dtype=WIDE, requires_grad=True) if other else None
    rows = x if subset is None else x[:, subset]
    q = nn.functional.linear(rows, module.Wq.weight, module.Wq.bias).unflatten(-1, (-1, DIM))
    kv = nn.functional.linear(x if x_kv is None else x_kv, module.Wkv.weight, module.Wkv.bias)
    k, v = kv.unflatten(-1, (2, -1, DIM)).unbind(2)
    context = formula(q, k, v, options.get("causal", False)).flatten(-2)
    expected = nn.functional.linear(context, module.out_proj.weight, module.out_proj.bias)
    out = module(x, x_kv=x_kv, mixer_subset=subset)
    if options.get("return_residual"):
        out, residual = out
        assert residual is x
    same(out, expected, [x, *module.parameters()] + ([x_kv] if other else []))


@pytest.mark.parametrize("causal, heads_k", [(False, HEADS), (True, HEADS), (False, 2)])
def test_padded_keys(causal, heads_k):
    """As packed sequences have it, in the rows that are tokens; 0 in a sequence without any."""
    keys = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    module = layer(causal=causal, num_heads_kv=heads_k)
    x = torch.randn(3, S, HEADS * DIM, dtype=WIDE)
    out = module(x, key_padding_mask=keys)
    for n, used in enumerate(keys.sum(-1).tolist()):
        alone = module(x[n : n + 1, :used]) if used else x[:1, :0]
        torch.testing.assert_close(out[n, :used], alone[0], rtol=1e-10, atol=1e-10)
    assert torch.equal(out[2], module.out_proj.bias.expand(S, -1))


def test_diagonal_of_padded_cross_attention():
    """Query i sees the keys up to i + used - Sq."""
    keys = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    q, kv = torch.randn(2, 3, 2, DIM).double(), torch.randn(2, 7, 2, 2, DIM).double()
    out = CrossAttention(causal=True)(q, kv, key_padding_mask=keys)
    for n, used in enumerate((4, 7)):
        k, v = kv[n : n + 1, :used].unbind(2)
        torch.testing.assert_close(out[n], formula(q[n : n + 1], k, v, True)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads_k", [HEADS, 2])
def test_packed(heads_k):
    module = layer(use_flash_attn=True, causal=True, num_heads_kv=heads_k)
    lengths = [3, 1, 5]
    x = torch.randn(sum(lengths), HEADS * DIM, dtype=WIDE)
    cu = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    out = module(x, cu_seqlens=cu, max_seqlen=5)
    expected = torch.cat([module(part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_inner_modules_in_and_out_of_training():
    qkv = torch.randn(2, 5, 3, 4, DIM)
    for module in (SelfAttention(attention_dropout=0.5), FlashSelfAttention(attention_dropout=0.5)):
        noisy, quiet = module(qkv), module.eval()(qkv)
        torch.testing.assert_close(quiet, formula(*qkv.unbind(2)), rtol=1e-5, atol=1e-5)
        assert (noisy - quiet).abs().max() > 0.1
        causal = module(qkv, causal=True)
        torch.testing.assert_close(causal, formula(*qkv.unbind(2), causal=True), rtol=1e-5, atol=1e-5)
    slopes = torch.tensor(get_alibi_slopes(4))
    cross = FlashCrossAttention(alibi_slopes=slopes, window_size=(2, 0)).half().float()
    q, kv = qkv[:, :3, 0], qkv[:, :, 1:]
    expected = formula(q, *kv.unbind(2), window=(2, 0), slopes=slopes.half().float())
    torch.testing.assert_close(cross(q, kv), expected, rtol=1e-5, atol=1e-5)


GENERATING = {
    "plain": dict(),
    "flash": dict(use_flash_attn=True),
    "rotary": dict(rotary_emb_dim=DIM),
    "flash-rotary": dict(use_flash_attn=True, rotary_emb_dim=DIM, rotary_emb_interleaved=True),
    "window": dict(use_flash_attn=True, window_size=(2, 0)),
    "alibi": dict(use_flash_attn=True, use_alibi=True),
}


@pytest.mark.parametrize("heads_k", [HEADS, 2])
@pytest.mark.parametrize("name", GENERATING)
@torch.no_grad()
def test_generation_is_the_whole_sequence_at_once(name, heads_k):
    module = layer(causal=True, layer_idx=3, num_heads_kv=heads_k, **GENERATING[name])
    x = torch.randn(B, 8, HEADS * DIM, dtype=WIDE)
    expected = module(x)
    params = InferenceParams(max_seqlen=10, max_batch_size=B)
    if name == "flash":
        params.key_value_memory_dict[3] = module.allocate_inference_cache(B, 10)
        assert params.key_value_memory_dict[3].shape == (B, 10, 2, heads_k, DIM)
    found = []
    for rows in (4, 1, 2, 1):
        part = x[:, params.seqlen_offset : params.seqlen_offset + rows]
        found.append(module(part, inference_params=params))
        params.seqlen_offset += rows
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="are needed"):
        module(torch.randn(B, 3, HEADS * DIM, dtype=WIDE), inference_params=params)


@torch.no_grad()
def test_generation_of_sequences_of_their_own_lengths():
    module = layer(causal=True, layer_idx=0, use_flash_attn=True, rotary_emb_dim=DIM)
    x = torch.randn(B, 7, HEADS * DIM, dtype=WIDE)
    params = InferenceParams(10, B)
    module(x[:, :6], inference_params=params)
    lengths = [6, 3]
    params.seqlen_offset, params.lengths_per_sample = 6, torch.tensor(lengths, dtype=torch.int32)
    out = module(x[:, 6:], inference_params=params)
    for n, used in enumerate(lengths):
        alone = module(torch.cat((x[n : n + 1, :used], x[n : n + 1, 6:]), 1))
        torch.testing.assert_close(out[n, 0], alone[0, -1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: MHA(30, 4), "multiple of num_heads"),
        (lambda: MHA(32, 4, num_heads_kv=3), "multiple of num_heads"),
        (lambda: MHA(32, 4, use_alibi=True), "use_flash_attn=True"),
        (lambda: MHA(32, 4, window_size=(2, 0)), "use_flash_attn=True"),
        (lambda: MHA(32, 4, cross_attn=True, rotary_emb_dim=8), "cross_attn=True"),
        (lambda: MHA(32, 4)(torch.ones(1, 2, 32), x_kv=torch.ones(1, 2, 32)), "cross_attn=True"),
        (lambda: MHA(32, 4)(torch.ones(2, 32), cu_seqlens=torch.tensor([0, 2]), max_seqlen=2), "needs use_flash_attn"),
        (lambda: MHA(32, 4, use_flash_attn=True)(torch.ones(2, 32), cu_seqlens=torch.tensor([0, 2])), "max_seqlen"),
        (
            lambda: MHA(32, 4, use_flash_attn=True)(torch.ones(1, 2, 32), key_padding_mask=torch.ones(1, 2)),
            "unpad_input",
        ),
        (lambda: MHA(32, 4)(torch.ones(1, 2, 32), inference_params=InferenceParams(4, 1)), "layer_idx"),
        (lambda: MHA(32, 4, dwconv=True)(torch.ones(1, 2, 32), inference_params=InferenceParams(4, 1)), "dwconv"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_examples_in_docstrings():
    failed, tried = doctest.testmod(mha)
    assert tried and not failed
