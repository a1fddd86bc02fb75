"""Tiny random models of transformers with flashsci's attention: logits and gradients in float32 are as near to the formula in
float64 as those of eager attention, by the two-error rule; packing, caches, and what is refused."""

from __future__ import annotations

import ast
import copy
import doctest
import inspect
import sys
from pathlib import Path

import pytest
import torch

import flashsci
from flashsci.integrations import transformers as integration

transformers = pytest.importorskip("transformers")

CAUSAL = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ENCODER = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=32,
    max_position_embeddings=64,
    pad_token_id=0,
)
# More windows than tokens in some, and fewer in others; a softcap that bends the scores; sinks that take a share.
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**CAUSAL),
    "mistral": lambda: transformers.MistralConfig(**CAUSAL, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **CAUSAL, sliding_window=4, attn_logit_softcapping=0.5, query_pre_attn_scalar=1
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **CAUSAL, sliding_window=4, num_local_experts=2, num_experts_per_tok=2
    ),
    "bert": lambda: transformers.BertConfig(**ENCODER),
    "modernbert": lambda: transformers.ModernBertConfig(
        **ENCODER,
        local_attention=6,
        global_attn_every_n_layers=2,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
}
DECODERS = ["llama", "mistral", "gemma2", "gpt_oss"]
LENGTH = 11


def formula(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **_):
    """Attention as written down, in the dtype of its arguments. (Eager attention takes the softmax in float32, and makes NaN
    of rows of padding in float64.) The mask is bool, and always there."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (key.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    weights = torch.exp(scores) * mask
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(s_aux).reshape(-1, 1, 1)
    weights = weights / torch.where(total == 0, 1, total)
    return (weights @ value).transpose(1, 2), weights


@pytest.fixture(autouse=True, scope="module")
def registered():
    from transformers.masking_utils import sdpa_mask

    def whole_mask(*arguments, **options):
        return sdpa_mask(*arguments, **options | dict.fromkeys(SKIPS, False))

    integration.register()
    transformers.AttentionInterface.register("formula", formula)
    transformers.AttentionMaskInterface.register("formula", whole_mask)


SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


def made(kind, config, std=0.3):
    """[the formula in float64, eager, fsci], with the same weights; those that begin as 0 or 1 are drawn too."""
    three = []
    for implementation in ("formula", "eager", "fsci"):
        model = kind._from_config(
            copy.deepcopy(config),
            attn_implementation=implementation,
            experts_implementation="eager",
        )
        if not three:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=std)
        else:
            model.load_state_dict(three[0].state_dict())
        assert model.config._attn_implementation == implementation
        three.append(model.eval())
    three[0].double()
    return three


def models(name: str):
    kind = transformers.AutoModelForCausalLM if name in DECODERS else transformers.AutoModel
    config = CONFIGS[name]()
    return made(kind._model_mapping[type(config)], config)


def output(model, *arguments, **options):
    result = model(*arguments, **options)
    return result.logits if "logits" in result else result.last_hidden_state


def judged(name, ours, eager, truth, factor=2, terms=None):
    """The largest error is at most ``factor`` times that of eager attention in the same dtype, plus roundings of the largest
    value (of the largest of ``terms``, where they cancel)."""
    error, plain = (x.double().sub(truth).abs().max().item() for x in (ours, eager))
    floor = 8 * torch.finfo(ours.dtype).eps * (truth if terms is None else terms).abs().max().item()
    assert error <= factor * plain + floor, f"{name}: error {error:.3g}, eager's {plain:.3g}, floor {floor:.3g}"


def compare(three, *arguments, rows=None, gradients=True, **options):
    """Outputs at the rows that count (bool [B, S]), and the gradients of all parameters of a sum of those."""
    outputs, found = [], []
    for model in three:
        out = output(model, *arguments, **options)
        out = out if rows is None else out[rows]
        outputs.append(out)
        if gradients:
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            leaves = dict(model.named_parameters())
            ends = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
            found.append(dict(zip(leaves, ends, strict=True)))
    truth, eager, ours = (x.detach() for x in outputs)
    judged("output", ours, eager, truth)
    assert not torch.isnan(ours).any()
    if gradients:
        gradients_judged(*found)


def gradients_judged(truth, eager, ours):
    """All as one vector by a factor of 2; each by 8: the roundings of a few elements went through all the layers above, and
    whose come out larger is chance."""
    whole = [[], [], []]
    for name, due in truth.items():
        assert (due is None) == (ours[name] is None), name
        if due is None:
            continue
        # What is added to all keys alike changes nothing: that gradient is 0.
        terms = truth[name.replace("bias", "weight")] if name.endswith("key.bias") else None
        judged(name, ours[name], eager[name], due, 8, terms)
        for parts, gradients in zip(whole, (ours, eager, truth), strict=True):
            parts.append(gradients[name].flatten())
    got, plain, due = (torch.cat(parts) for parts in whole)
    errors = [(x.double() - due).norm().item() for x in (got, plain)]
    assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(got.dtype).eps * due.norm().item(), errors


def tokens(batch=2, length=LENGTH):
    return torch.randint(3, 50, (batch, length))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_as_eager(name, padding):
    ids = tokens()
    if padding == "none":
        return compare(models(name), ids)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 4) if padding == "left" else slice(-4, None)] = 0
    compare(models(name), ids, attention_mask=mask, rows=mask.bool())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bert"])
def test_bfloat16(name):
    """Weights as bf16 has them, also where the formula is taken in float64."""
    three = [model.bfloat16() for model in models(name)]
    three[0].double()
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    compare(three, ids, attention_mask=mask, rows=mask.bool(), gradients=False)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_the_users_own(name, kind):
    """[B, 1, S, S], not causal: followed as they are; a mask of bools is what transformers calls one of numbers for eager."""
    keep = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    ids, outputs = tokens(), []
    number = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    masks = keep, number, keep if kind == "bool" else number  # eager attention takes numbers
    for model, mask in zip(models(name), masks, strict=True):
        outputs.append(output(model, ids, attention_mask=mask).detach())
    judged("logits", outputs[2], outputs[1], outputs[0])


def test_position_bias():
    """T5: its bias of distances is learnt, causal in the decoder, and the decoder attends to the encoder."""
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    three = made(transformers.T5Model, config)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, -3:] = 0
    compare(three, tokens(), attention_mask=mask, decoder_input_ids=tokens(length=6))


LENGTHS = [3, 1, 5, 2]


def packed():
    ids = tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, positions


def alone(model, ids):
    """Every sequence in a call of its own."""
    return torch.cat([output(model, x, use_cache=False) for x in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("how", ["cached", "uncached", "offsets", "offsets uncached"])
def test_packed_sequences_do_not_meet(name, how):
    """With a cache, the default, transformers makes the mask of one long sequence, or none; windows are shorter than the row."""
    ids, positions = packed()
    given = dict(position_ids=positions, use_cache="uncached" not in how)
    if "offsets" in how:
        cu = torch.tensor([0, *LENGTHS]).cumsum(0)
        given.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5)
    truth_model, eager, ours = models(name)
    truth = alone(truth_model, ids).detach()
    out = output(ours, ids, **given)
    judged("logits", out.detach(), alone(eager, ids).detach(), truth)
    # Gradients: those of the first sequence come from its own tokens only.
    embedding = ours.get_input_embeddings()
    embedding.weight.requires_grad_()
    (gradient,) = torch.autograd.grad(out[0, : LENGTHS[0]].sum(), embedding.weight)
    assert set(gradient.abs().sum(1).nonzero().flatten().tolist()) <= set(ids[0, :3].tolist()) or (
        ours.config.tie_word_embeddings
    )


def test_packed_rows_of_a_batch():
    """Several packed rows with a cache: transformers itself would let all of a row meet."""
    ids, positions = packed()
    batch, turned = torch.cat([ids, ids.flip(1)]), positions.flip(1)
    places = torch.cat([positions, torch.cat([torch.arange(n) for n in LENGTHS[::-1]])[None]])
    assert not torch.equal(turned, places[1:])
    truth, eager, ours = models("llama")
    due = torch.cat(
        [
            alone(truth, ids),
            torch.cat([output(truth, x, use_cache=False) for x in ids.flip(1).split(LENGTHS[::-1], 1)], 1),
        ]
    )
    plain = output(eager, batch, position_ids=places, use_cache=False)
    judged("logits", output(ours, batch, position_ids=places).detach(), plain, due)


def test_packing_runs_as_varlen(monkeypatch):
    """Where a mask holds no more than what the offsets and the window say, the packed kernels take the call."""
    ids, positions = packed()
    _, _, ours = models("mistral")
    monkeypatch.setattr(integration, "attention", None)
    for cached in (True, False):
        output(ours, ids, position_ids=positions, use_cache=cached)


def test_masks_of_the_users_own_beside_positions_that_fall():
    """A tree that shares a prefix: positions come twice, the mask says who sees whom, and it counts."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 2, 3]])
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    keep[5:, 2:5] = False
    keep = keep[None, None]
    number = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    ids, outputs = tokens(1, 7), []
    for model, mask in zip(models("llama"), (keep, number, keep), strict=True):
        outputs.append(output(model, ids, attention_mask=mask, position_ids=positions).detach())
    judged("logits", outputs[2], outputs[1], outputs[0])


def test_positions_are_read_once_for_all_layers(monkeypatch):
    ids, positions = packed()
    _, _, ours = models("llama")
    reads = []
    read = integration._Packing.__new__
    monkeypatch.setattr(integration._Packing, "__new__", lambda *a, **k: reads.append(1) or read(*a, **k))
    output(ours, ids, position_ids=positions)
    assert len(reads) == 1
    positions[0, 3:] += 1  # changed in place: one sequence more or fewer must be seen
    positions[0, 3] = 3
    changed = output(ours, ids, position_ids=positions)
    assert torch.equal(changed, output(ours, ids, position_ids=positions.clone()))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(name, cache):
    """Prefill and decoding, a padded row among them: the same tokens, and logits by the two-error rule."""
    ids = tokens(3, 6)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for given in (mask, None):
        found = [
            model.generate(
                ids, attention_mask=given, max_new_tokens=5, min_new_tokens=5, do_sample=False,
                cache_implementation=cache, return_dict_in_generate=True, output_logits=True,
            )
            for model in models(name)
        ]  # fmt: skip
        truth, eager, ours = found
        assert torch.equal(ours.sequences, truth.sequences)
        stacked = (torch.stack(x.logits) for x in (ours, eager, truth))
        judged("logits", *stacked)


def test_continued_caches():
    """A prompt in pieces: several queries after a cache that is not empty."""
    ids = tokens(2, 9)
    outputs = []
    for model in models("mistral"):
        cache = transformers.DynamicCache(config=model.config)
        pieces = [output(model, x, past_key_values=cache) for x in ids.split([4, 3, 2], 1)]
        outputs.append(torch.cat(pieces, 1).detach())
    judged("logits", outputs[2], outputs[1], outputs[0])


@pytest.fixture
def calls(monkeypatch):
    """The calls of flashsci.attention: (shapes of q, k, v; options)."""
    seen = []

    def spy(q, k, v, **options):
        seen.append(([tuple(x.shape) for x in (q, k, v)], options))
        return flashsci.attention(q, k, v, **options)

    monkeypatch.setattr(integration, "attention", spy)
    return seen


def test_grouped_heads_are_not_repeated_and_static_caches_are_cut(calls):
    _, _, ours = models("llama")
    ids = tokens(1, 6)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=20)
    output(ours, ids, past_key_values=cache)
    assert [shapes for shapes, _ in calls] == [[(1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)]] * 2
    assert all(options["causal"] and "mask" not in options for _, options in calls)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "modernbert"])
def test_masks_that_are_windows_run_as_windows(calls, name, padded):
    """transformers writes a window as a mask of pairs; padding stays one, and so does what is not known."""
    _, _, ours = models(name)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0 if padded else 1
    output(ours, ids, attention_mask=mask)
    assert calls and all(("mask" in options) == padded for _, options in calls)
    windows = {options.get("window") for _, options in calls}
    assert padded or windows - {None} == {(3, 3)}


class Layer(torch.nn.Module):
    """What an attention function sees of an attention layer."""

    is_causal = True

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.projection = torch.nn.Linear(2, 2, dtype=dtype)


def heads(*shape, dtype=torch.float32):
    return torch.randn(3, *shape, dtype=dtype).unbind(0)


def test_dropout_in_training_only():
    q, k, v = heads(1, 2, 6, 8)
    layer = Layer()
    torch.manual_seed(3)
    dropped, _ = integration.attention_forward(layer, q, k, v, None, dropout=0.5)
    torch.manual_seed(3)
    due = flashsci.attention(q, k, v, causal=True, dropout_p=0.5).transpose(1, 2)
    assert torch.equal(dropped, due)
    whole, _ = integration.attention_forward(layer.eval(), q, k, v, None, dropout=0.5)
    torch.testing.assert_close(whole, flashsci.attention(q, k, v, causal=True).transpose(1, 2))


def test_float32_beside_16_bit_weights():
    """As PEFT leaves it; a float32 model and autocast are left alone."""
    q, k, v = heads(1, 2, 6, 8)
    for dtype in (torch.bfloat16, torch.float32):
        out, weights = integration.attention_forward(Layer(dtype), q, k, v, None)
        assert out.dtype == dtype and weights is None
    quantised = Layer()
    quantised.config = type("Config", (), dict(_is_quantized=True, dtype=torch.float16))
    assert integration.attention_forward(quantised, q, k, v, None)[0].dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (Layer(), Layer(torch.float16)):
            assert integration.attention_forward(layer, q, k, v, None)[0].dtype == torch.bfloat16


def test_sinks():
    """Against a softmax with one more column, in float64, gradients of the sinks included; a sink of +-30 too."""
    q, k, v = (x.requires_grad_() for x in heads(2, 4, 7, 8, dtype=torch.float64))
    sinks = torch.tensor([0.3, -1.0, 30.0, -30.0], dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 7, 7) < 0.7
    mask[1, :, 2] = False  # all that is left is the sink, and it has no value
    ours, _ = integration.attention_forward(Layer(), q, k, v, mask, s_aux=sinks)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
    column = sinks[None, :, None, None].expand(2, 4, 7, 1)
    due = (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    torch.testing.assert_close(ours, due, rtol=1e-12, atol=1e-14)
    leaves, dout = (q, k, v, sinks), torch.randn_like(due)
    pairs = zip(*(torch.autograd.grad(x, leaves, dout) for x in (ours, due)), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("window", [None, 3])
def test_windows_without_a_mask(window):
    """Causal: itself and w - 1 before. Not causal: as many after. One query: the last of its keys."""
    q, k, v = heads(2, 4, 7, 8)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    near = distance.abs() < (window or 99)
    for causal, keep in ((True, near & (distance >= 0)), (False, near)):
        out, _ = integration.attention_forward(Layer(), q, k, v, None, sliding_window=window, is_causal=causal)
        torch.testing.assert_close(out, flashsci.attention(q, k, v, mask=keep).transpose(1, 2))
        if causal:
            last, _ = integration.attention_forward(Layer(), q[:, :, -1:], k, v, None, sliding_window=window)
            torch.testing.assert_close(last, out[:, -1:])


@pytest.mark.parametrize(
    "positions, offsets",
    [
        ([[0, 1, 2, 3]], None),
        ([[7, 8, 9, 20]], None),  # a gap: still one sequence
        ([[0, 1, 0, 0, 1]], [0, 2, 3, 5]),
        ([[4, 5, 6, 2, 3]], [0, 3, 5]),  # documents cut at their beginning
        ([[3, 4, 3, 4]], [0, 2, 4]),
        ([[0, 1, 2], [0, 0, 1]], [0, 3, 4, 6]),
    ],
)
def test_sequences_in_positions(positions, offsets):
    found = integration._from_positions(torch.tensor(positions), len(positions))
    assert (found and found.cu_q.tolist()) == offsets
    if found:
        assert found.max_q == max(b - a for a, b in zip(offsets, offsets[1:]))  # noqa: B905, RUF007


def test_bias_before_a_static_cache_is_full():
    q, k, v = heads(1, 2, 7, 8)
    bias = torch.randn(1, 2, 3, 7, dtype=torch.float16)  # neither q's dtype nor float32
    out, _ = integration.attention_forward(Layer(), q[:, :, :3], k, v, None, position_bias=bias)
    used = (x[:, :, :3] for x in (q, k, v))
    due = flashsci.attention(*used, bias=bias[..., :3].float(), causal=True).transpose(1, 2)
    torch.testing.assert_close(out, due)


@pytest.mark.parametrize("given, due", [(True, True), (False, None), (None, None)])
def test_deterministic(calls, given, due):
    """False, which models pass by default, is no wish: torch's own switch still counts."""
    integration.attention_forward(Layer(), *heads(1, 2, 6, 8), None, deterministic=given)
    assert calls[0][1]["deterministic"] is due


@pytest.mark.parametrize("masked", [False, True])
def test_positions_beside_a_bias(masked):
    """A mask that does not know of the packing does not hide it, bias or not."""
    q, k, v = heads(1, 2, 6, 8)
    bias = torch.randn(1, 2, 6, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    mask = causal[None, None] if masked else None
    out, _ = integration.attention_forward(Layer(), q, k, v, mask, position_bias=bias, position_ids=positions)
    same = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
    due = flashsci.attention(q, k, v, bias=bias, mask=same & causal).transpose(1, 2)
    torch.testing.assert_close(out, due)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_packing_beside_a_bias_or_a_mask(kind):
    """What the packed kernels do not take is masked: the bias keeps its gradient."""
    q, k, v = heads(1, 2, 6, 8)
    bias = torch.randn(1, 2, 6, 6, requires_grad=True)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    same = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
    own = torch.rand(1, 1, 6, 6) < 0.8
    mask = dict(none=None, bool=own, float=torch.zeros(own.shape).masked_fill(~own, -1e9))[kind]
    keep = same & (torch.ones(6, 6, dtype=torch.bool).tril() if kind == "none" else own)
    out, _ = integration.attention_forward(
        Layer(), q, k, v, mask, position_bias=bias, cu_seq_lens_q=cu, cu_seq_lens_k=cu
    )
    due = flashsci.attention(q, k, v, bias=bias, mask=keep).transpose(1, 2)
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), bias)[0] for x in (out, due)))


def test_compiles():
    """In one graph; packed offsets are followed there too, beside the mask that transformers then always makes."""
    config = transformers.MistralConfig(**CAUSAL | dict(num_hidden_layers=1), sliding_window=3)
    _, eager, ours = made(transformers.MistralModel, config)
    ids, positions = packed()
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    with torch.no_grad():
        compiled = torch.compile(
            lambda: output(
                ours, ids, use_cache=False, position_ids=positions,
                cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5,
            ),
            backend="eager", fullgraph=True,
        )  # fmt: skip
        torch.testing.assert_close(compiled(), alone(eager, ids))


@pytest.mark.parametrize(
    "name, says",
    [
        ("flashsci", "'flash': transformers takes every name"),
        ("my_flash", "'flash'"),
        ("sdpa", "'sdpa'"),
        ("flex_attention_2", "'flex_attention'"),
        ("org/kernel", "kernel to download"),
        ("kernel:name", "kernel to download"),
        ("paged|fsci", "kind of cache"),
        ("eager", "taken by transformers"),
        ("", "taken by transformers"),
    ],
)
def test_names_that_mean_something_else_are_refused(name, says):
    with pytest.raises(ValueError, match=says.replace("|", "[|]")):
        integration.register(name)
    known = ("sdpa", "eager", "paged|fsci")  # of transformers, and what register() adds for "fsci"
    assert name in known or name not in transformers.AttentionInterface().valid_keys()


def test_a_name_with_flash_in_it_breaks():
    """Why it is refused: the day that this passes without an error, the rule may go."""
    name = "not_a_flash_kernel"
    transformers.AttentionInterface.register(name, integration.attention_forward)
    try:
        with pytest.raises((ValueError, ImportError)):
            transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation=name)
    finally:
        del transformers.AttentionInterface._global_mapping[name]


def test_without_the_mask_function_padding_is_dropped():
    """Why it is registered: the left padding of a model without it changes what the other tokens get."""
    assert "fsci" in transformers.AttentionMaskInterface().valid_keys()
    _, eager, ours = models("llama")
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    due = output(eager, ids, attention_mask=mask)[mask.bool()]
    torch.testing.assert_close(output(ours, ids, attention_mask=mask)[mask.bool()], due)
    function = transformers.AttentionMaskInterface._global_mapping.pop("fsci")
    try:
        wrong = output(ours, ids, attention_mask=mask)[mask.bool()]
    finally:
        transformers.AttentionMaskInterface.register("fsci", function)
    assert (wrong - due).abs().max() > 0.01


def test_registering():
    integration.register("fsci_of_another_name")
    integration.register("fsci_of_another_name")
    transformers.AttentionInterface.register("somebody_elses", lambda *a, **k: None)
    try:
        with pytest.raises(ValueError, match="another attention function"):
            integration.register("somebody_elses")
    finally:
        for name in ("somebody_elses", "fsci_of_another_name"):
            del transformers.AttentionInterface._global_mapping[name]
            transformers.AttentionMaskInterface._global_mapping.pop(name, None)


def test_a_model_that_is_there_changes_over():
    _, eager, _ = models("llama")
    ids = tokens()
    due = output(eager, ids)
    eager.set_attn_implementation("fsci")
    assert eager.config._attn_implementation == "fsci"
    torch.testing.assert_close(output(eager, ids), due)


def test_example_in_the_docstring():
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (example,) = finder.find(integration.register, "register", integration)
    assert example.examples
    runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers"):
        integration.register()


@pytest.mark.parametrize("name", integration.REFUSED)
def test_refused_by_name(name):
    q, k, v = heads(1, 2, 6, 8)
    integration.attention_forward(Layer(), q, k, v, None, **{name: None})
    with pytest.raises(ValueError, match=f"{name} is not supported: "):
        integration.attention_forward(Layer(), q, k, v, None, **{name: True})


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert"])
def test_probabilities_of_models(name):
    """Those of every layer, as near to the formula in float64 as eager attention's."""
    exact, eager, ours = models(name)
    padded = torch.ones(2, LENGTH, dtype=torch.int64)
    padded[1, -3:] = 0
    given = dict(input_ids=tokens(), attention_mask=padded)
    with torch.no_grad():
        due, plain, found = (m(**given, output_attentions=True).attentions for m in (exact, eager, ours))
    seen = padded.bool()[:, None, :, None]
    assert len(found) == len(due) == 2
    for a, b, c in zip(due, plain, found, strict=True):
        error, allowed = ((x.double() - a).masked_fill(~seen, 0).norm() for x in (c, b))
        assert c.shape == a.shape and error <= 2 * allowed + 8 * torch.finfo(torch.float32).eps * a.norm()


@pytest.mark.parametrize("how", ["packed", "unused keys", "decoding", "empty rows"])
def test_probabilities_give_the_output(how):
    q, k, v = heads(2, 4, 6, 8)
    mask, more = None, {}
    if how == "packed":
        more = dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    elif how == "unused keys":
        q = q[:, :, :4]
    elif how == "decoding":
        q = q[:, :, :1]
    else:
        mask = torch.rand(2, 1, 6, 6) < 0.5
        mask[:, :, 2] = False
    out, weights = integration.attention_forward(Layer(), q, k, v, mask, output_attentions=True, **more)
    assert weights.shape == (*q.shape[:3], k.shape[2]) and weights.dtype == q.dtype
    torch.testing.assert_close((weights @ v).transpose(1, 2), out)
    assert torch.equal(integration.attention_forward(Layer(), q, k, v, mask, **more)[0].isfinite(), out.isfinite())


def test_arguments_that_do_not_fit():
    q, k, v = heads(1, 2, 6, 8)
    cu = torch.tensor([0, 6])
    with pytest.raises(ValueError, match="go together"):
        integration.attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=cu)
    with pytest.raises(ValueError, match="one logit for each of 2 heads"):
        integration.attention_forward(Layer(), q, k, v, None, s_aux=torch.zeros(3))
    with pytest.raises(ValueError, match="as many queries as keys"):
        integration.attention_forward(
            Layer(), q[:, :, :3], k, v, None, position_bias=torch.zeros(6), is_causal=False,
            cu_seq_lens_q=torch.tensor([0, 3]), cu_seq_lens_k=cu,
        )  # fmt: skip


def read_by_transformers() -> set[str]:
    """The arguments that the attention functions of transformers read, those of single models included."""
    root = Path(transformers.__file__).parent
    names = set()
    shared = [root / "integrations" / f"{n}.py" for n in ("sdpa_attention", "flash_attention", "flex_attention", "eager_paged", "sdpa_paged", "flash_paged", "msa_attention")]  # fmt: skip
    for path in [*shared, *sorted(root.glob("models/*/modeling_*.py"))]:
        text = path.read_text(encoding="utf-8")
        at = text.find("def eager_attention_forward(")
        if path in shared:
            tree = ast.parse(text)
        elif at >= 0:
            tree = ast.parse(text[at : text.index(":\n", text.index(")", at)) + 2] + "    pass")
        else:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("attention_forward"):
                names |= {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "kwargs.get",
                "kwargs.pop",
            ):
                names.add(ast.literal_eval(node.args[0]))
    return names


def test_no_argument_is_ignored_that_transformers_reads():
    """Supported or refused: a release that adds one shows here."""
    known = set(inspect.signature(integration.attention_forward).parameters) | set(integration.REFUSED)
    names = read_by_transformers()
    assert {"scaling", "softcap", "s_aux", "position_bias", "output_attentions"} <= names
    # Of functions with other names for the same, of continuous batching (`cache` is refused), and of its block kernels.
    others = {"q", "k", "v", "max_seqlen_q", "max_seqlen_k", "cache_position", "query_states", "key_states", "value_states"}  # fmt: skip
    assert names - known - others == set()


def test_the_page_runs():
    """docs/guide/dropins/transformers.md; test_docs.py leaves its block out, since transformers may not be there."""
    page = Path(__file__).resolve().parents[3] / "docs" / "guide" / "dropins" / "transformers.md"
    blocks = page.read_text().split("``` {.python}\n")[1:]
    assert blocks
    for block in blocks:
        scope = {}
        exec(block.split("```")[0], scope)
        assert scope["model"].config._attn_implementation == "fsci"
        assert torch.isfinite(scope["logits"]).all()
