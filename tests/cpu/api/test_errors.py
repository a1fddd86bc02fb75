"""Bad and odd input: a clear error, or the specified result. One test each."""

import math
from types import SimpleNamespace

import pytest
import torch

import flashsci
from flashsci.call import arguments
from flashsci.choice import backends


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def refuses(kind, message, call, *args, **options):
    """The call raises exactly this kind of error and says this."""
    with pytest.raises(kind, match=message) as caught:
        call(*args, **options)
    assert caught.type is kind
    return str(caught.value)


Q = torch.randn(2, 4, 5, 8)
K = torch.randn(2, 2, 6, 8)


def test_wrong_rank():
    refuses(
        ValueError,
        r"q must have at least two dims \[S, D\], got shape \[8\]",
        flashsci.attention,
        Q[0, 0, 0],
        K,
        K,
    )
    refuses(
        ValueError,
        r"packed q must have shape \[T, H, D\], got \[2, 4, 5, 8\]",
        flashsci.varlen_attention,
        Q,
        K,
        K,
        offsets(0, 5),
    )


def test_head_counts():
    refuses(
        ValueError,
        "multiple of the number of key heads, got 4 and 3",
        flashsci.attention,
        Q,
        draw(2, 3, 6, 8),
        draw(2, 3, 6, 8),
    )
    refuses(ValueError, "same number of heads, got 2 and 1", flashsci.attention, Q, K, K[:, :1])
    refuses(ValueError, "got 0 and 0", flashsci.attention, Q[:, :0], K[:, :0], K[:, :0])


def test_lengths_and_head_dims():
    refuses(ValueError, "same length .* got 6 and 5", flashsci.attention, Q, K, K[:, :, :5])
    refuses(ValueError, "same head dim .* got 8 and 7", flashsci.attention, Q, K[..., :7], K)


def test_head_dim_zero():
    refuses(
        ValueError,
        "head dims must be at least 1, got 0",
        flashsci.attention,
        Q[..., :0],
        K[..., :0],
        K,
    )
    refuses(ValueError, r"and 0 \(v\)", flashsci.attention, Q, K, K[..., :0])


def test_leading_dims_that_do_not_broadcast():
    refuses(ValueError, "do not broadcast", flashsci.attention, Q, draw(3, 2, 6, 8), draw(3, 2, 6, 8))


def test_dtype_mix():
    message = refuses(TypeError, "must share one dtype", flashsci.attention, Q, K.half(), K)
    assert "torch.float32" in message and "torch.float16" in message and "cast" in message
    refuses(
        TypeError,
        "must be float16, bfloat16, float32 or float64, got torch.int64",
        flashsci.attention,
        *(x.long() for x in (Q, K, K)),
    )


def test_not_a_tensor():
    refuses(TypeError, "k must be a torch.Tensor, got list", flashsci.attention, Q, [1.0], K)
    refuses(
        TypeError,
        "mask must be a torch.Tensor or None, got str",
        flashsci.attention,
        Q,
        K,
        K,
        mask="causal",
    )


def test_device_mix():
    """Tensors on two devices (meta stands in for a GPU)."""
    other = K.to("meta")
    message = refuses(ValueError, "move them to one device", flashsci.attention, Q, other, K)
    assert "cpu" in message and "meta" in message
    for name, x in (("bias", draw(5, 6)), ("mask", torch.ones(5, 6, dtype=torch.bool))):
        refuses(ValueError, f"{name} is on meta", flashsci.attention, Q, K, K, **{name: x.to("meta")})
    refuses(
        ValueError,
        "dropout_seed is on meta",
        flashsci.attention,
        Q,
        K,
        K,
        dropout_p=0.5,
        backend="reference",
        dropout_seed=torch.zeros(2, dtype=torch.int64, device="meta"),
    )
    packed = draw(5, 2, 8)
    refuses(
        ValueError,
        "cu_seqlens_q is on meta",
        flashsci.varlen_attention,
        packed,
        packed,
        packed,
        offsets(0, 5).to("meta"),
    )


def test_bias_that_does_not_broadcast():
    message = refuses(ValueError, "does not broadcast", flashsci.attention, Q, K, K, bias=draw(5, 5))
    assert "[5, 5]" in message and "[2, 4, 5, 6]" in message
    refuses(ValueError, "does not broadcast", flashsci.attention, Q, K, K, bias=draw(1, 2, 4, 5, 6))
    refuses(
        ValueError,
        "mask of shape",
        flashsci.attention,
        Q,
        K,
        K,
        mask=torch.ones(3, 1, 1, 1, dtype=torch.bool),
    )
    one = draw(1, 4, 1, 8)
    refuses(
        ValueError,
        "does not broadcast",
        flashsci.attention,
        one,
        K[:1, :, :1],
        K[:1, :, :1],
        bias=draw(2, 1),
    )


def test_bool_bias():
    message = refuses(TypeError, "bool", flashsci.attention, Q, K, K, bias=torch.ones(5, 6, dtype=torch.bool))
    assert "mask=" in message


def test_dtype_of_bias_and_mask():
    refuses(
        TypeError,
        "bias must have q's dtype .* or float32",
        flashsci.attention,
        Q,
        K,
        K,
        bias=draw(5, 6).double(),
    )
    refuses(TypeError, "mask must be a bool tensor", flashsci.attention, Q, K, K, mask=draw(5, 6))


@pytest.mark.parametrize("values", [(0, 4, 3, 5), (0, 3, 4), (0, 3, 6), (1, 5), (0, -1, 5), (5, 0)])
def test_offsets_that_fall_or_end_elsewhere(values):
    x = draw(5, 2, 8)
    message = refuses(
        ValueError,
        r"must rise from 0 to the number of packed rows \(5\)",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(*values),
    )
    assert str(list(values)) in message and "cu_seqlens_q" in message
    refuses(
        ValueError,
        "cu_seqlens_k",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, *(len(values) - 2) * (2,), 5),
        offsets(*values),
    )


def test_offsets_elsewhere_are_checked_on_request_only(monkeypatch):
    """On a GPU (a CPU tensor that says so here), contents are read only with validate=True."""
    from flashsci.api import varlen

    seen = []
    monkeypatch.setattr(varlen, "check_contents", lambda *a: seen.append(a))
    x = draw(5, 2, 8)
    flashsci.varlen_attention(x, x, x, offsets(0, 5))
    assert len(seen) == 1, "always on the CPU"
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(arguments, "is_readable", lambda x: True)
    assert not arguments.contents_are_seen(elsewhere, False)
    assert arguments.contents_are_seen(elsewhere, True)


def test_offsets_of_fake_tensors_are_not_read():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(5, 2, 8)
        starts = torch.empty(2, dtype=torch.int32)
        for validate in (False, True):
            out = flashsci.varlen_attention(x, x, x, starts, validate=validate, backend="reference")
            assert out.shape == x.shape


def test_offsets_are_checked_below_a_dispatch_mode():
    from torch.utils.flop_counter import FlopCounterMode

    x = draw(5, 2, 8)
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="cu_seqlens_q"):
        flashsci.varlen_attention(x, x, x, offsets(0, 4))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_meta_tensors_give_shapes(backend):
    """Shape inference on the meta device, as SDPA supports it."""
    q, k = Q.to("meta"), K.to("meta")
    out = flashsci.attention(q, k, k, causal=True, backend=backend)
    assert out.is_meta and out.shape == Q.shape


def test_forms_of_offsets():
    x = draw(5, 2, 8)
    refuses(
        TypeError,
        r"must be int32, got torch.int64; call \.to\(torch\.int32\)",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 5).long(),
    )
    refuses(
        ValueError,
        r"must have shape \[N \+ 1\]",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 5)[None],
    )
    refuses(ValueError, r"must have shape \[N \+ 1\]", flashsci.varlen_attention, x, x, x, offsets())
    refuses(
        ValueError,
        "same number of sequences, got 1 and 2",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 5),
        offsets(0, 2, 5),
    )
    refuses(
        ValueError,
        "a sequence of 5 rows, longer than the given maximum 4",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 5),
        max_seqlen_q=4,
    )


def test_packed_bias_of_another_size():
    x = draw(5, 2, 8)
    refuses(
        ValueError,
        r"sum of Sq\*Sk = 13",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 2, 5),
        bias=draw(2, 12),
    )
    refuses(
        ValueError,
        "Hb 1 or 2",
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 2, 5),
        bias=draw(3, 13),
    )


def test_alibi_slopes():
    for kind, message, slopes in (
        (TypeError, "alibi_slopes must be a torch.Tensor or None, got float", 0.5),
        (TypeError, r"must be float32, got torch.float16; call .float\(\)", draw(4).half()),
        (TypeError, "got torch.float64", draw(4).double()),
        (
            ValueError,
            r"alibi_slopes of shape \[3\] does not broadcast to \[..., Hq\] = \[2, 4\]",
            draw(3),
        ),
        (ValueError, "does not broadcast", draw(1, 2, 4)),
        (ValueError, "alibi_slopes is on meta but q is on cpu", torch.ones(4, device="meta")),
    ):
        refuses(kind, message, flashsci.attention, Q, K, K, alibi_slopes=slopes)
    x = draw(5, 2, 8)
    message = r"does not broadcast to \[..., N, Hq\] = \[2, 2\]"
    refuses(
        ValueError,
        message,
        flashsci.varlen_attention,
        x,
        x,
        x,
        offsets(0, 2, 5),
        alibi_slopes=draw(3, 2),
    )


def test_key_weights():
    for kind, message, weight in (
        (TypeError, "key_weight must be a torch.Tensor or None, got float", 0.5),
        (TypeError, "goes in mask=", torch.ones(6, dtype=torch.bool)),
        (TypeError, "key_weight must have q's dtype .* or float32, got torch.float64", draw(6).double()),
        (TypeError, "got torch.int64", torch.ones(6, dtype=torch.int64)),
        (ValueError, r"key_weight of shape \[4, 6\] does not broadcast to \[..., Hk, Sk\] = \[2, 2, 6\]", draw(4, 6)),
        (ValueError, "does not broadcast", draw(5)),
        (ValueError, "does not broadcast", draw(2, 2, 1, 6)),
        (ValueError, "key_weight is on meta but q is on cpu", torch.ones(6, device="meta")),
    ):
        refuses(kind, message, flashsci.attention, Q, K, K, key_weight=weight)
    x = draw(5, 2, 8)
    for weight in (draw(4), draw(3, 5), draw(2, 1, 5), draw(2, 1)):
        message = r"a packed key_weight must be \[Tk = 5\] or \[Hw, Tk\] with Hw 1 or 2"
        refuses(ValueError, message, flashsci.varlen_attention, x, x, x, offsets(0, 2, 5), key_weight=weight)
    weight = torch.rand(6, requires_grad=True)
    refuses(
        flashsci.BackendError, "derivative at zero is lost", flashsci.attention, Q, K, K, key_weight=weight, backend="sdpa"
    )  # fmt: skip


def test_keys_that_all_weigh_nothing():
    """As a row without keys, on every backend that serves it."""
    weight = torch.rand(2, 1, 6)
    weight[1] = 0
    for backend in ("reference", "sdpa"):
        q, k, v = (x.clone().requires_grad_() for x in (Q, K, K))
        out = flashsci.attention(q, k, v, key_weight=weight, backend=backend)
        assert out[1].eq(0).all() and out[0].ne(0).any()
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad[1].eq(0).all() and x.grad.isfinite().all()
    weight.requires_grad_()
    out, lse = flashsci.attention(Q, K, K, key_weight=weight, return_lse=True)
    assert lse[1].eq(-math.inf).all()
    (out.sum() + lse[0].sum()).backward()
    assert weight.grad[1].eq(0).all() and weight.grad[0].ne(0).all()


def test_options():
    for message, options in (
        ("align must be one of", {"align": "left"}),
        ("scale must be finite", {"scale": math.nan}),
        ("softcap must be positive", {"softcap": -1.0}),
        ("dropout_p must be in", {"dropout_p": 1.0}),
        ("dropout_p must be in", {"dropout_p": -0.1}),
        ("precision must be None or one of", {"precision": "bf16"}),
        ("window must be", {"window": 3}),
        ("window must be", {"window": {3, 0}}),
        ("window must be", {"window": (1.5, 0)}),
        ("window must be", {"window": (1, 2, 3)}),
        ("window sides must be >= 0", {"window": (-2, 0)}),
        (
            "dropout_seed must be an int64 tensor of shape",
            {"dropout_p": 0.5, "dropout_seed": torch.zeros(2)},
        ),
    ):
        refuses(ValueError, message, flashsci.attention, Q, K, K, backend="reference", **options)


def test_no_keys_and_no_queries():
    out, lse = flashsci.attention(Q, K[:, :, :0], K[:, :, :0], return_lse=True)
    assert out.eq(0).all() and lse.eq(-math.inf).all()
    assert flashsci.attention(Q, K[:, :, :0], K[:, :, :0]).eq(0).all()
    assert flashsci.attention(Q[:, :, :0], K, K).shape == (2, 4, 0, 8)
    x = draw(0, 2, 8)
    assert flashsci.varlen_attention(x, x, x, offsets(0)).shape == (0, 2, 8)


def test_one_key():
    assert torch.equal(flashsci.attention(Q[:, :2], K[:, :, :1], K[:, :, :1]), K[:, :, :1].expand(2, 2, 5, 8))


def test_unknown_backend():
    message = refuses(ValueError, "unknown backend 'flash'", flashsci.attention, Q, K, K, backend="flash")
    assert all(repr(name) in message for name in ("auto", "reference", "sdpa", "triton", "cuda"))
    with pytest.raises(ValueError, match="unknown backend"), flashsci.use_backend("flash"):
        pass


def test_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("FLASHSCI_BACKEND", "fast")
    refuses(ValueError, "unknown backend 'fast'", flashsci.attention, Q, K, K)


def no_library(monkeypatch, reason):
    cuda = backends.BACKENDS["cuda"].load()
    monkeypatch.setattr(cuda, "unavailable", lambda: reason)


def test_cuda_build_absent(monkeypatch, fresh_choices):
    """Asked for by name: run Triton and warn once with the reason; strict: BackendError."""
    no_library(monkeypatch, "the CUDA library was not built: nvcc was not on the PATH")
    with pytest.warns(UserWarning, match=r"backend 'cuda' is unavailable, running 'triton': .* was not built"):
        out = flashsci.attention(Q, K, K, backend="cuda")
    torch.testing.assert_close(out, flashsci.attention(Q, K, K, backend="reference"))
    with flashsci.use_backend("cuda", strict=True):
        message = refuses(flashsci.BackendError, "was not built", flashsci.attention, Q, K, K)
    assert "'reference'" in message and "'triton'" in message


def test_cuda_library_missing_from_disk(monkeypatch, fresh_choices):
    cuda = backends.BACKENDS["cuda"].load()
    monkeypatch.setattr(cuda.library, "library_path", lambda: None)
    monkeypatch.setattr(cuda.library, "_loaded", False)
    monkeypatch.setattr(cuda.library, "_problem", None)
    assert "was not built" in cuda.unavailable() and "nvcc" in cuda.unavailable()


def test_driver_absent():
    """No GPU here: the reason names what is missing, for cuda and (not interpreted) for Triton."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    reason = backends.BACKENDS["cuda"].load().unavailable()
    assert reason is not None and any(word in reason for word in ("was not built", "without CUDA", "no CUDA device"))
    with flashsci.use_backend("cuda", strict=True):
        refuses(flashsci.BackendError, "cannot serve this call", flashsci.attention, Q, K, K)


def test_messages_of_a_refusal_name_alternatives():
    with pytest.raises(flashsci.BackendError) as caught:
        flashsci.attention(Q, K, K, softcap=2.0, backend="sdpa")
    assert "SDPA has no softcap" in str(caught.value) and "'reference'" in str(caught.value)


def test_nested_tensors_take_no_bias():
    x = torch.nested.nested_tensor([draw(3, 8), draw(2, 8)], layout=torch.jagged)
    refuses(ValueError, "varlen_attention", flashsci.attention, x, x, x, bias=draw(1))
    refuses(ValueError, "varlen_attention", flashsci.attention, x, x, x, key_weight=draw(1))
    refuses(
        ValueError,
        "jagged nested tensors.* got k with layout torch.strided",
        flashsci.attention,
        x,
        draw(2, 3, 8),
        x,
    )


def test_errors_are_the_same_with_a_cached_plan():
    """A call that was fine does not hide the error of one that differs."""
    flashsci.attention(Q, K, K)
    refuses(TypeError, "share one dtype", flashsci.attention, Q, K, K.double())
    refuses(ValueError, "same length", flashsci.attention, Q, K, K[:, :, :-1])
