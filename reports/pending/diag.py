# ruff: noqa
"""What a GPU says of the cells and the case that differ from a CPU: python reports/pending/diag.py [case] [cells] [ops]"""

import sys, json, traceback, time
from dataclasses import replace
import torch
import os

if os.environ.get("HOPPER"):
    from flashsci.choice import backends as _b

    _b.load("triton")
    import flashsci.backends.triton.plans.many_jvp, flashsci.backends.triton.plans.second_jvp, flashsci.backends.triton.plans.second_order
    from flashsci.backends.triton.launcher import Device

    for n, m in list(sys.modules.items()):
        if n.startswith("flashsci.backends.triton") and hasattr(m, "device_of") and "launcher" not in n:
            m.device_of = lambda d: Device(-1, (9, 0), 50 << 20, 132)
D = "cuda" if torch.cuda.is_available() else "cpu"
t0 = time.time()


def say(*x):
    print(f"[{time.time() - t0:.0f}]", *x, flush=True)


what = sys.argv[1:] or ["case", "cells", "ops"]
if "case" in what:
    from flashsci.testing import Case, Judge, Variant, evaluate, make_inputs
    from flashsci.testing import cases
    from flashsci.backends.triton import tilings

    C = Case(
        variant=Variant(
            dtype="bfloat16",
            head_dim=1,
            head_dim_v=1,
            bias="pair",
            bias_float=False,
            bias_grad=True,
            key_weight=None,
            key_weight_grad=False,
            alibi=False,
            sink=None,
            mask=False,
            window=True,
            softcap=True,
            dropout=False,
            varlen=True,
            lse_grad=False,
            caps_bias=True,
            gate=None,
            flipped=False,
            tangents="qkvb",
        ),
        seed=867308736,
        rank=3,
        lead=(),
        heads_k=3,
        group=2,
        seq_q=0,
        seq_k=0,
        lens_q=(257,),
        lens_k=(257,),
        self_attention=True,
        known_lengths=True,
        causal=True,
        window=None,
        align="upper_left",
        scale=0.05,
        softcap=15.0,
        dropout_p=0.0,
        bias_shape=(1, 66049),
        bias_view="transposed",
        bias_holes=False,
        bias_number="float32_min",
        bias_number_at="scattered",
        bias_scale=1.0,
        weight_shape=None,
        weight_view="contiguous",
        weight_zeros="some",
        gate_shape=None,
        gate_view="contiguous",
        mask_shape=None,
        mask_kind="random",
        mask_view="contiguous",
        layout="bhsd",
        layouts=("bhsd", "bshd", "packed"),
        negated="",
        magnitude="unit",
        padding="tail",
        dout_scale=1e-06,
        execution="hooks",
        precision=None,
        tangent_magnitude="unit",
    )
    inputs = make_inputs(C)

    def report(title, given, **options):
        try:
            judge = Judge(given.on(D) if hasattr(given, "on") else given)
            found = evaluate(replace(judge.inputs, execution=given.execution), "triton", **options)
            say(
                title,
                [str(p)[:80] for p in (judge.problems(found) if hasattr(judge, "problems") else [])]
                if hasattr(judge, "problems")
                else "",
            )
            for n in ("out", "lse", "dq", "dbias", "gdout", "gq", "gk", "gv", "gbias"):
                if n not in found:
                    continue
                a, b, c = (
                    found[n].double(),
                    judge.truth[n].double().to(found[n].device),
                    judge.baseline[n].double().to(found[n].device),
                )
                e, f = (a - b).abs(), (c - b).abs()
                at = torch.unravel_index(e.argmax(), e.shape)
                say(
                    "  ",
                    n,
                    tuple(a.shape),
                    f"max {b.abs().max():.3g} err {e.max():.3g} baseline {f.max():.3g} at {[int(x) for x in at]} is {a[at]:.4g} true {b[at]:.4g}",
                )
            try:
                judge.require(found)
                say("   passes")
            except AssertionError as x:
                say("   FAILS", str(x)[:300])
            return judge, found
        except Exception:
            say(title, traceback.format_exc()[-1500:])

    got = report("as drawn", inputs)
    if got:
        judge, found = got
        e = (found["gdout"].double() - judge.truth["gdout"].double().to(found["gdout"].device)).abs().flatten(-1)
        e = e.reshape(found["gdout"].shape[0], -1) if found["gdout"].dim() > 1 else e
        top = e.flatten().topk(12)
        say("   worst of gdout", [(int(i), float(v)) for v, i in zip(*top)], "shape", tuple(found["gdout"].shape))
        b = judge.inputs.bias.float().reshape(257, 257)
        low = b < -1e30
        say(
            "   low numbers",
            int(low.sum()),
            "rows of them",
            low.tril().any(1).nonzero().flatten()[:40].tolist(),
            "inf",
            int(torch.isinf(b).sum()),
        )
        for n in range(8):
            again = evaluate(replace(judge.inputs, execution="hooks" if n % 2 else ""), "triton")["gdout"].double()
            e = (again - judge.truth["gdout"].double().to(again.device)).abs()
            rows = (e > 0.05).any(-1).nonzero().tolist()
            say("   again", n, float(e.max()), "rows, heads beyond 0.05:", len(rows), rows[:12])
        at = torch.unravel_index(
            ((found["gdout"].double() - judge.truth["gdout"].double().to(found["gdout"].device)).abs()).argmax(),
            found["gdout"].shape,
        )
        i = int(at[0])
        seen = b[i, : i + 1]
        say("   row", i, "keys that are low:", (seen < -1e30).nonzero().flatten().tolist()[:64], "of", i + 1)
    report("no hooks", replace(inputs, execution=""))
    before = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(tilings).items()}
    kept = tilings.config

    def stages(*a, **k):
        m, n, w, s = kept(*a, **k)
        return m, n, w, 1

    tilings.config = stages
    try:
        from flashsci.call import plans

        plans.plans.clear()
        import flashsci.backends.triton.plans.dense as dense

        dense.plan_of.cache_clear() if hasattr(dense.plan_of, "cache_clear") else None
    except Exception:
        traceback.print_exc()
    report("one stage", inputs)
    tilings.config = kept
if "cells" in what:
    import tests.machinery.table
    from tests.machinery.cells import MACHINERIES, Call

    for name, *call in (
        ("older vmap over directions", "attention", "bias", "triton"),
        ("older vmap over directions", "attention", "mask", "triton"),
        ("older vmap over directions", "attention", "key_weight", "auto"),
        ("older vmap over directions", "distributed.triangle_attention", "q", "auto"),
        ("compile, reverse", "attention_backward", "key_weight", "auto"),
        ("compiled checkpoint, rematerialised", "attention_backward", "key_weight", "auto"),
        ("jit.trace", "forward_laplacian", "mask", "triton"),
    ):
        try:
            m, c = MACHINERIES[name], Call(*call, D)
            pairs = list(m.run(c))
            say(name, call, "fine:", [float((a.double().cpu() - b.double().cpu()).abs().max()) for a, b in pairs])
        except BaseException as x:
            text = traceback.format_exc()
            lines = [
                l
                for l in text.splitlines()
                if l.strip().startswith("File") and ("flashsci" in l or "autograd" in l or "_vmap" in l)
            ]
            say(
                "====",
                name,
                call,
                type(x).__name__,
                "\n",
                str(x)[:300],
                "\n ...",
                str(x)[-1500:],
                "\n",
                "\n".join(lines[-14:]),
            )
if "ops" in what:
    from tests.support.raw_op_calls import CALLS, all_ops
    from flashsci.choice import backends

    backends.load("triton")
    all_ops()
    for right in CALLS:
        if "many_jvp" in right.op:
            given = tuple(right.arguments(D).values())
            op = getattr(torch.ops.flashsci, right.op).default
            for check in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
                try:
                    torch.library.opcheck(op, given, test_utils=check)
                    say(right, check, "ok")
                except BaseException as x:
                    say(right, check, type(x).__name__, str(x)[-700:])
