"""SGLang's attention backend between stand-ins with the signatures of SGLang 0.5.18: what its steps become in paged calls, against
the formula, with what only GPUs do (captured decodes) or SGLang's models on a CPU do not (sinks). tests/serving has its engine."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

PAGE, SLOTS, WIDTH = 16, 40 * 16, 96  # tokens of a page, of the pool, of a request


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None


class Mode(Enum):
    EXTEND = 1
    DECODE = 2

    def is_decode(self):
        return self is Mode.DECODE

    is_decode_or_idle = is_decode


class Pool:
    """SGLang's token slots; in 8 bits it keeps bytes and divides by the scale."""

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype
        self.store = [torch.full((SLOTS, 2, 8), torch.nan).to(dtype) for _ in range(2)]

    def get_key_buffer(self, layer_id):
        return self.store[0]

    def get_value_buffer(self, layer_id):
        return self.store[1]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for x, cache, scale in ((cache_k, self.store[0], k_scale), (cache_v, self.store[1], v_scale)):
            cache[loc_info.loc] = (x if scale is None else x / scale).to(self.dtype)


class WindowPool:
    """Two pools, layer 1 in the one of layers with a window, whose slots are others."""

    def __init__(self):
        self.pools = [Pool(), Pool()]
        self.layers_mapping = {0: (0, False), 1: (0, True)}
        self.mapping = torch.cat([torch.arange(i, i + PAGE) for i in range(SLOTS - PAGE, -1, -PAGE)])

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.mapping[kv_indices]

    def get_key_buffer(self, layer_id):
        return self.pools[layer_id].store[0]

    def get_value_buffer(self, layer_id):
        return self.pools[layer_id].store[1]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        loc = loc_info.swa_loc if layer.layer_id == 1 else loc_info.loc
        self.pools[layer.layer_id].set_kv_buffer(layer, KVWriteLoc(loc), cache_k, cache_v)


@pytest.fixture
def integration(monkeypatch):
    """flashsci.integrations.sglang over the stand-ins; its module and they are gone afterwards."""
    registered, choices = {}, ["triton"]

    def module(name, **names):
        made = ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    srt = "sglang.srt"
    for name in ("sglang", srt, f"{srt}.layers", f"{srt}.layers.attention", f"{srt}.mem_cache"):
        module(name)
    attention = f"{srt}.layers.attention"
    module(f"{attention}.base_attn_backend", AttentionBackend=type("AttentionBackend", (), {}))
    module(f"{srt}.layers.radix_attention", AttentionType=AttentionType)
    module(f"{srt}.mem_cache.memory_pool", KVWriteLoc=KVWriteLoc)
    module(
        f"{attention}.attention_registry",
        register_attention_backend=lambda name: lambda made: registered.setdefault(name, made),
    )
    module(
        f"{srt}.server_args",
        ATTENTION_BACKEND_CHOICES=choices,
        add_attention_backend_choices=choices.extend,
    )
    monkeypatch.delitem(sys.modules, "flashsci.integrations.sglang", raising=False)
    found = importlib.import_module("flashsci.integrations.sglang")
    yield SimpleNamespace(module=found, registered=registered, choices=choices)
    del sys.modules["flashsci.integrations.sglang"]


def layer(**options):
    return SimpleNamespace(
        **dict(
            tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=8, v_head_dim=8, scaling=0.3, layer_id=0, logit_cap=0.0,
            sliding_window_size=-1, is_cross_attention=False, k_scale=None, v_scale=None, xai_temperature_len=-1,
            attn_type=AttentionType.DECODER,
        )
        | options
    )  # fmt: skip


class Requests:
    """Three requests with pages in random order, and all keys and values they will ever have."""

    def __init__(self, integration, pool=None):
        self.pool = pool or Pool()
        pages = torch.randperm(SLOTS // PAGE)[: 3 * WIDTH // PAGE].reshape(3, -1, 1)
        rows = (pages * PAGE + torch.arange(PAGE)).reshape(3, -1)
        table = torch.zeros(5, WIDTH, dtype=torch.int32)
        self.places = torch.tensor([3, 0, 4])
        table[self.places] = rows.to(torch.int32)
        self.slots = rows
        self.keys, self.values = torch.randn(2, 3, WIDTH, 2, 8)
        self.backend = integration.module.FlashSciBackend(
            SimpleNamespace(
                page_size=PAGE,
                device="cpu",
                token_to_kv_pool=self.pool,
                req_to_token_pool=SimpleNamespace(req_to_token=table),
                ps=SimpleNamespace(attn_dcp_size=1),
            )
        )

    def batch(self, before, after, which=(0, 1, 2)):
        """A step that takes requests from lengths ``before`` to ``after``."""
        new = [b - a for a, b in zip(before, after, strict=True)]
        take = [slice(a, b) for a, b in zip(before, after, strict=True)]
        lens = torch.tensor(after)
        mode = Mode.DECODE if all(n == 1 for n in new) else Mode.EXTEND
        step = SimpleNamespace(
            batch_size=len(which), forward_mode=mode, spec_info=None, req_pool_indices=self.places[list(which)],
            seq_lens=lens, seq_lens_cpu=lens, extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new,
            out_cache_loc=torch.cat([self.slots[n, t] for n, t in zip(which, take, strict=True)]),
        )  # fmt: skip
        step.new = [torch.cat([x[n, t] for n, t in zip(which, take, strict=True)]) for x in (self.keys, self.values)]
        return step

    def run(self, before, after, made, which=(0, 1, 2), prepare=None, **options):
        """One layer of a step, judged by the two-error rule."""
        step = self.batch(before, after, which)
        (prepare or self.backend.init_forward_metadata)(step)
        query = torch.randn(step.out_cache_loc.shape[0], 32)
        run = self.backend.forward_decode if step.forward_mode.is_decode() else self.backend.forward_extend
        out = run(query, *step.new, made, step, **options)
        assert out.shape == query.shape
        keys, values = self.keys, self.values
        if made.k_scale is not None:
            keys, values = (
                (x / s).to(self.pool.dtype).float() * s for x, s in ((keys, made.k_scale), (values, made.v_scale))
            )
        parts = (x.reshape(-1, 4, 8).split([b - a for a, b in zip(before, after, strict=True)]) for x in (out, query))
        for n, end, found, q in zip(which, after, *parts, strict=True):
            judge(found, q, keys[n, :end], values[n, :end], made, options.get("sinks"))


def formula(q, k, v, made, sinks, dtype):
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    scores = 0.3 * q @ k.transpose(1, 2)
    if made.logit_cap:
        scores = made.logit_cap * torch.tanh(scores / made.logit_cap)
    back = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (back < 0) & (made.attn_type != AttentionType.ENCODER_ONLY)
    if made.sliding_window_size >= 0:  # of SGLang: so many keys before a query's own
        hidden |= back > made.sliding_window_size
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def judge(out, q, k, v, made, sinks):
    truth, plain = (formula(q, k, v, made, sinks, d) for d in (torch.float64, torch.float32))
    error, due = ((x.double() - truth).abs().max().item() for x in (out, plain))
    assert error <= 2 * due + 8 * torch.finfo(torch.float32).eps * v.abs().max().item()


LAYERS = [dict(), dict(sliding_window_size=5, logit_cap=2.0), dict(sliding_window_size=0)]


@pytest.mark.parametrize("options", LAYERS)
def test_prompts_chunks_and_decodes(integration, options):
    requests, made = Requests(integration), layer(**options)
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    requests.run((0, 0, 0), (20, 1, 33), made, sinks=sinks)
    requests.run((20, 1, 33), (21, 9, 40), made)
    requests.run((21, 9, 40), (22, 10, 41), made, sinks=sinks)


def test_encoders(integration):
    requests = Requests(integration)
    requests.run((0, 0, 0), (20, 1, 33), layer(attn_type=AttentionType.ENCODER_ONLY))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_pools(integration, dtype):
    requests = Requests(integration, Pool(dtype))
    made = layer(k_scale=torch.tensor(0.25), v_scale=torch.tensor(2.0))
    requests.run((0, 0, 0), (20, 1, 33), made)
    requests.run((20, 1, 33), (21, 2, 34), made)


def test_layers_with_a_pool_of_their_own(integration):
    requests = Requests(integration, WindowPool())
    for made in (layer(), layer(layer_id=1, sliding_window_size=5)):
        requests.run((0, 0, 0), (20, 1, 33), made)
        requests.run((20, 1, 33), (21, 2, 34), made)
    stored = [pool.store[0].isnan().all(-1).all(-1) for pool in requests.pool.pools]
    assert not torch.equal(*stored), "slots of the two are others"


@pytest.mark.parametrize("pool", [Pool, WindowPool])
def test_a_captured_decode_reads_the_same_tensors_later(integration, pool):
    requests = Requests(integration, pool())
    made = layer(layer_id=1, sliding_window_size=5) if pool is WindowPool else layer()
    backend = requests.backend
    requests.run((0, 0, 0), (20, 1, 33), made)
    backend.init_cuda_graph_state(4, 4)
    seen = []

    def capture(step):
        backend.init_forward_metadata_out_graph(step, in_capture=not seen)
        now = backend.step
        seen.append([now.cu_seqlens_q, now.seqused_k, now.tables.pages, now.tables.window_pages])

    requests.run((20, 1, 33), (21, 2, 34), made, prepare=capture)
    requests.run((21, 34, 2), (22, 35, 3), made, which=(0, 2, 1), prepare=capture)
    assert [x.data_ptr() for x in seen[0]] == [x.data_ptr() for x in seen[1]]
    assert not torch.equal(seen[0][1], torch.tensor([21, 2, 34], dtype=torch.int32)), "refilled"
    with pytest.raises(ValueError, match="only decoding is"):
        backend.init_forward_metadata_out_graph(requests.batch((0,), (5,), (0,)))


def test_rows_that_pad_a_replay_write_to_the_slot_of_nobody(integration):
    """SGLang pads indices and lengths, and not the slots of new tokens; what stood in their buffer may be a live token's."""
    requests = Requests(integration, WindowPool())
    backend, capture = requests.backend, requests.backend.init_forward_metadata_out_graph
    made = layer(layer_id=1, sliding_window_size=5)
    requests.run((0, 0, 0), (20, 1, 33), made)
    backend.init_cuda_graph_state(4, 4)
    requests.run((20, 1, 33), (21, 2, 34), made, prepare=capture)
    step = requests.batch((21, 34), (22, 35), which=(0, 2))
    step.batch_size = 3
    step.req_pool_indices, step.seq_lens = (
        torch.cat([x, torch.tensor([fill])]) for x, fill in ((step.req_pool_indices, 0), (step.seq_lens, 1))
    )
    capture(step)
    moved = requests.pool.translate_loc_from_full_to_swa(step.out_cache_loc)
    assert backend.step.tables.window_slots.tolist() == [*moved.tolist(), 0]


def test_what_layers_read_from_a_backend(integration):
    """SGLang's layers ask the backend for both pools (`sglang.srt.model_executor.forward_context`)."""
    requests = Requests(integration)
    assert requests.backend.token_to_kv_pool is requests.pool
    assert requests.backend.req_to_token_pool.req_to_token.shape == (5, WIDTH)


def test_refusals(integration):
    requests = Requests(integration)
    step = requests.batch((0, 0, 0), (2, 1, 3))
    requests.backend.init_forward_metadata(step)
    q = torch.randn(6, 32)
    for options, says in (
        (dict(is_cross_attention=True), "cross attention"),
        (dict(attn_type=AttentionType.DECODER_BIDIRECTIONAL), "both directions"),
        (dict(xai_temperature_len=8), "temperature by length"),
    ):
        with pytest.raises(ValueError, match=f"{says}.* not supported"):
            requests.backend.forward_extend(q, *step.new, layer(**options), step)
    with pytest.raises(ValueError, match="k_rope not supported"):
        requests.backend.forward_extend(q, *step.new, layer(), step, k_rope=q)
    step.spec_info = object()
    with pytest.raises(ValueError, match="speculative decoding"):
        requests.backend.init_forward_metadata(step)
    with pytest.raises(ValueError, match="--page-size 16"):
        integration.module.FlashSciBackend(SimpleNamespace(page_size=1))
    with pytest.raises(ValueError, match="--dcp-size is not supported"):
        integration.module.FlashSciBackend(SimpleNamespace(page_size=PAGE, ps=SimpleNamespace(attn_dcp_size=2)))


def test_registration(integration):
    integration.module.register()
    integration.module.register()
    assert integration.registered == {"fsci": integration.module.FlashSciBackend}
    assert integration.choices == ["triton", "fsci"]
