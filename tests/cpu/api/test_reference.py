"""The reference against attention written row by row, and its derivatives of first and second order."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashsci
from flashsci.testing import Judge, Variant, evaluate, generate, make_inputs, variants
from tests.support.naive import naive

SMALL = (0, 1, 2, 3, 4, 6)


def fp64_variants(varlen):
    dims = {1: 1, 3: 3}
    return [
        replace(v, dtype="float64", head_dim=dims.get(v.head_dim, 4), head_dim_v=dims.get(v.head_dim_v, 2))
        for v in variants()
        if v.varlen == varlen
    ]


def cases(*arguments, **limits):
    """Generated ones whose masks as numbers leave the scores of whole rows their digits in fp64."""
    for case in generate(*arguments, **limits):
        yield replace(case, bias_number="-1e4") if case.bias_number else case


def close(found, truth, what):
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-11, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("part", range(4))
def test_dense_against_row_by_row(part):
    """Forward, lse and first derivatives over generated dense problems in fp64."""
    for case in cases(100 + part, 25, fp64_variants(False), lengths=SMALL, score_limit=200):
        inputs = make_inputs(case).to(torch.float64)
        found = evaluate(inputs, "reference")
        leaves = {n: getattr(inputs, n).requires_grad_() for n in ("q", "k", "v")}
        options = dict(inputs.options)
        if inputs.bias is not None:
            leaves["bias"] = inputs.bias.requires_grad_(inputs.bias_grad)
        if inputs.key_weight is not None:
            leaves["key_weight"] = inputs.key_weight.requires_grad_(inputs.key_weight_grad)
        if case.dropout_p:
            shape = tuple(torch.broadcast_shapes(case.score_shape))
            options["keep"] = flashsci.dropout_mask(inputs.dropout_seed, case.dropout_p, shape)
        else:
            del options["dropout_p"]
        if inputs.sink is not None:
            leaves["sink"] = inputs.sink.requires_grad_()
        if inputs.pair_gate is not None:
            leaves["pair_gate"] = inputs.pair_gate.requires_grad_()
        if inputs.alibi_slopes is not None:
            leaves["alibi_slopes"] = inputs.alibi_slopes.requires_grad_(inputs.alibi_grad)
        out, lse = naive(**leaves, mask=inputs.mask, **options)
        written = {"out": out.detach(), "lse": lse.detach()}
        wanted = {f"d{n}": x for n, x in leaves.items() if x.requires_grad}
        dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse
        total = (out * inputs.dout).sum() + torch.where(torch.isfinite(lse), lse * dlse, 0 * dlse).sum()
        if total.requires_grad:
            gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
            for (name, x), gradient in zip(wanted.items(), gradients, strict=True):
                written[name] = torch.zeros_like(x) if gradient is None else gradient
        if case.magnitude == "huge" or case.scale == 1e8:
            # Scores of 1e7 and more: their roundings alone are beyond fixed tolerances, in fp64 too.
            problems = [f.problem for f in Judge(inputs).findings(written) if f.problem]
            assert not problems, (case, problems)
            continue
        for name, x in written.items():
            close(found[name], x, (name, case))


def test_packed_against_one_call_per_sequence():
    """varlen_attention is attention of each sequence by itself; biases and gradients included."""
    for case in cases(7, 40, fp64_variants(True), lengths=(0, 1, 3, 5, 8), score_limit=2000):
        inputs = make_inputs(case).to(torch.float64)
        found = evaluate(inputs, "reference")
        start_q = start_k = pairs = 0
        for n, (a, b) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
            rows, keys = slice(start_q, start_q + a), slice(start_k, start_k + b)
            block = None
            if inputs.bias is not None:
                per_key = inputs.bias.dim() == 3 or case.variant.bias == "key"
                columns = keys if per_key else slice(pairs, pairs + a * b)
                block = inputs.bias[..., columns].reshape(len(inputs.bias), *((1, b) if per_key else (a, b)))
            weight, slopes = inputs.key_weight, inputs.alibi_slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[n if len(slopes) > 1 else 0]
            one = replace(
                inputs, alibi_slopes=slopes, key_weight=None if weight is None else weight[..., keys], q=inputs.q[rows].transpose(0, 1), k=inputs.k[keys].transpose(0, 1),
                v=inputs.v[keys].transpose(0, 1), bias=block, dout=inputs.dout[rows].transpose(0, 1),
                dlse=None if inputs.dlse is None else inputs.dlse[:, rows], cu_seqlens_q=None, cu_seqlens_k=None,
                options={k: v for k, v in inputs.options.items() if "seqlen" not in k},
            )  # fmt: skip
            if case.dropout_p and n:
                continue  # the counter of a later sequence is not that of a batch of one
            alone = evaluate(one, "reference")
            for name, part in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
                close(found[name][part].transpose(0, 1), alone[name], (name, case))
            close(found["lse"][:, rows], alone["lse"], case)
            if "dbias" in alone:
                close(found["dbias"][..., columns].reshape(alone["dbias"].shape), alone["dbias"], case)
            if "dkey_weight" in alone:
                close(found["dkey_weight"][..., keys], alone["dkey_weight"], case)
            start_q, start_k, pairs = rows.stop, keys.stop, pairs + a * b


FEATURES = {
    "plain": {},
    "grouped heads, causal": {"group": 2, "causal": True, "variant": Variant(window=True)},
    "window, lower right": {"window": (1, 1), "align": "lower_right", "variant": Variant(window=True)},
    "softcap": {"softcap": 1.5, "variant": Variant(softcap=True)},
    "bias": {"bias_shape": (2, 3, 1), "variant": Variant(bias="pair", bias_grad=True)},
    "bias and softcap": {"bias_shape": (1, 1, 1, 4), "softcap": 1.5, "variant": Variant(bias="key", bias_grad=True)},
    "softcap of biased scores": {
        "bias_shape": (2, 3, 4), "bias_holes": True, "softcap": 1.5,
        "variant": Variant(bias="pair", bias_grad=True, softcap=True, caps_bias=True),
    },
    "softcap of a bias alone": {
        "bias_shape": (2, 3, 4), "softcap": 1.5, "scale": 0.0, "variant": Variant(bias="pair", bias_grad=True, softcap=True, caps_bias=True, flipped=True)
    },
    "gate of pairs": {"gate_shape": (1, 3, 4), "variant": Variant(gate="inputs")},
    "gate of pairs, dropout": {
        "gate_shape": (2, 3, 4), "dropout_p": 0.5, "variant": Variant(gate="inputs", dropout=True)
    },
    "bias with -inf": {
        "bias_shape": (2, 3, 4), "bias_holes": True, "variant": Variant(bias="pair", bias_grad=True)
    },
    "mask with empty rows": {"mask_shape": (2, 3, 4), "mask_kind": "rows", "variant": Variant(mask=True), "seed": 3},
    "dropout": {"dropout_p": 0.5, "variant": Variant(dropout=True)},
    "key weights": {"weight_shape": (2, 4), "weight_zeros": "none", "variant": Variant(key_weight="inputs", key_weight_grad=True)},
    "key weights, bias and softcap": {
        "weight_shape": (1, 4), "weight_zeros": "none", "bias_shape": (2, 3, 1), "softcap": 1.5,
        "variant": Variant(key_weight="inputs", key_weight_grad=True, bias="pair", bias_grad=True),
    },
    "packed with key weights": {
        "lens_q": (2, 3), "lens_k": (1, 3), "weight_shape": (4,), "weight_zeros": "none",
        "variant": Variant(varlen=True, key_weight="inputs", key_weight_grad=True),
    },
    "packed": {"lens_q": (2, 0, 3), "lens_k": (1, 2, 3), "variant": Variant(varlen=True)},
    "packed with ragged bias": {
        "lens_q": (2, 3), "lens_k": (1, 3), "bias_shape": (2, 11), "variant": Variant(varlen=True, bias="pair", bias_grad=True)
    },
}  # fmt: skip


def differentiable(fields, backend, with_lse):
    """A function of (q, k, v[, bias][, pair_gate]) and its fp64 leaves; -inf rows of the lse left out."""
    from flashsci.testing import Case

    variant = replace(fields.get("variant", Variant()), dtype="float64", head_dim=3, head_dim_v=2)
    shape = {"rank": 3, "lead": ()} if variant.varlen else {"lead": (1,)}
    case = Case(**{"heads_k": 2, "seq_q": 3, "seq_k": 4, "seed": 1, **shape, **fields, "variant": variant})
    inputs = make_inputs(case).to(torch.float64)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if inputs.bias is not None:
        # Entries of -inf have no finite differences: hold them fixed.
        holes = torch.isinf(inputs.bias)
        leaves.append(torch.where(holes, torch.zeros_like(inputs.bias), inputs.bias).requires_grad_())
    if inputs.pair_gate is not None:
        leaves.append(inputs.pair_gate.requires_grad_())

    def call(q, k, v, *others):
        bias = others[0] if inputs.bias is not None else None
        if bias is not None:
            bias = torch.where(holes, -torch.inf, bias)
        options = dict(inputs.options, bias=bias, backend=backend, return_lse=with_lse)
        if inputs.dropout_seed is not None:
            options["dropout_seed"] = inputs.dropout_seed
        if inputs.pair_gate is not None:
            options["pair_gate"] = others[-1]
        if case.variant.varlen:
            found = flashsci.varlen_attention(q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, **options)
        else:
            found = flashsci.attention(q, k, v, mask=inputs.mask, **options)
        if not with_lse:
            return found
        out, lse = found
        return out, torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)

    return call, tuple(leaves)


def test_a_softcap_bounds_a_bias_without_products():
    q, k, v, bias = (torch.randn(1, 2, n, m, dtype=torch.double) for n, m in ((3, 8), (4, 8), (4, 8), (3, 4)))
    options = dict(bias=4 * bias, scale=0.0, softcap=1.5, softcap_at="biased")
    expected, _ = naive(q, k, v, **options)
    torch.testing.assert_close(flashsci.attention(q, k, v, backend="reference", **options), expected)


@pytest.mark.parametrize("feature", FEATURES)
def test_reference_derivatives(feature):
    call, leaves = differentiable(FEATURES[feature], "reference", with_lse=True)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=False)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize(
    "feature", [f for f in FEATURES if "softcap" not in f and "packed" not in f and "gate" not in f and f != "dropout"]
)
def test_sdpa_derivatives(feature):
    call, leaves = differentiable(FEATURES[feature], "sdpa", with_lse=False)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_forward_mode_and_hessian_of_the_reference():
    call, (q, k, v) = differentiable({}, "reference", with_lse=False)
    assert torch.autograd.gradcheck(call, (q, k, v), check_forward_ad=True, check_backward_ad=False)
    energy = lambda x: call(x, k.detach(), v.detach()).square().sum()  # noqa: E731
    hessian = torch.func.hessian(energy)(q.detach())
    direct = torch.autograd.functional.hessian(energy, q.detach())
    torch.testing.assert_close(hessian, direct)


def test_row_in_no_sequence():
    """Raw op: packed rows behind the last offset get out 0 and lse -inf."""
    from flashsci.backends import reference
    from flashsci.call.ops import Scalars, Tensors

    q, k, v = torch.randn(3, 1, 6, 4).unbind(0)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    scalars = Scalars(-1, -1, 0.5, 0.0, -1, -1, False, 0.0, "default", False)
    tensors = Tensors(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    out, lse = reference.forward(tensors, scalars)
    assert out[:, 4:].eq(0).all() and lse[:, 4:].eq(-torch.inf).all() and lse[:, :4].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_bf16_rows_of_one_element_read_no_neighbours(backend):
    """torch's bf16 product on the CPU reads past the rows of a strided [63, 1]: NaN must not come in."""

    def column(rows):
        return torch.full((rows, 9), torch.nan, dtype=torch.bfloat16)[:, :1].copy_(torch.randn(rows, 1))

    q, k, v = (column(n).requires_grad_() for n in (63, 128, 128))
    out = flashsci.attention(q, k, v, backend=backend)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out, (q, k, v), column(63)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_its_lse_belongs_to_the_probabilities_of_its_backward(dtype, packed):
    """Large scores, which 16 bits round by much: each row of P must sum to 1 all the same, so that the dv of equal
    rows of dout sums to that row."""
    q, k, v, dout = (8 * torch.randn(n, 2, 16) for n in (12, 9, 9, 12))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    dout = torch.ones_like(dout).to(dtype)
    bias, options = torch.randn(2, 1, 9).to(dtype), {"softcap": 50.0}
    dense = lambda x: x.transpose(0, 1)  # noqa: E731
    if packed:
        options.update(
            cu_seqlens_q=torch.tensor([0, 12], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 9], dtype=torch.int32)
        )
        out, lse = flashsci.varlen_attention(q, k, v, bias=bias, return_lse=True, backend="reference", **options)
    else:
        q, k, v, dout = (dense(x) for x in (q, k, v, dout))
        out, lse = flashsci.attention(q, k, v, bias=bias, return_lse=True, backend="reference", **options)
    found = flashsci.attention_backward(dout, q, k, v, out, lse, bias=bias, backend="reference", **options)
    sums = found.dv.double().sum(0 if packed else -2)
    torch.testing.assert_close(sums, torch.full_like(sums, 12), rtol=4 * torch.finfo(dtype).eps, atol=0)

    # And the gradients are autograd's, of the same forward.
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    if packed:
        end = flashsci.varlen_attention(*leaves[:3], bias=leaves[3], backend="reference", **options)
    else:
        end = flashsci.attention(*leaves[:3], bias=leaves[3], backend="reference", **options)
    wanted = torch.autograd.grad(end, leaves, dout)
    for name, a, b in zip(found._fields[:4], found[:4], wanted, strict=True):
        if name == "dv":  # the others cancel to rounding here: dout is the same for all
            torch.testing.assert_close(a, b, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("switch", ["tf32", "ieee"])
def test_products_are_fp32_whatever_torchs_switch_says(switch):
    """On a GPU, of which only shapes and dtypes are here: the products of forward and backward are in fp64 under TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = switch
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm):
                products.append({x.dtype for x in args})
            return op(*args, **(kwargs or {}))

    try:
        with FakeTensorMode(), Products():
            q = torch.empty(2, 4, 8, device="cuda")
            out, lse = flashsci.attention(q, q, q, return_lse=True, backend="reference")
            forward = len(products)
            found = flashsci.attention_backward(out, q, q, q, out, lse, backend="reference")
            assert {x.dtype for x in (out, *found[:3])} == {torch.float32}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert (forward, len(products)) == (2, 7)
    assert all(p == {torch.float64 if switch == "tf32" else torch.float32} for p in products)
