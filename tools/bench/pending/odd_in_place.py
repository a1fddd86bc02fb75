"""The forward with a 16-bit bias of pairs of odd lengths: in windows (row_pitch.IN_PLACE), by a copy, and the next length that needs neither.

    PYTHONPATH=$PWD python /work/notes/next/odd_in_place.py        (in a worktree with a built flashsci/_C.so of branch oddrows)

First which kernels compute the calls, then their errors against float64, then medians of interleaved times in us.
"""
import sys, torch, flashsci
from flashsci.backends.cuda import decisions
from flashsci.call import plans, row_pitch
from flashsci.call.ops import Scalars, Tensors
sys.path.insert(0, "/work/notes/next")
from common import times

torch.manual_seed(0)
B, H = 4, 16

def made(S, D, dtype=torch.bfloat16, kind="heads"):
    q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return q, k, v, torch.randn(*{"heads": (B, H), "batch": (1, H), "all": (1, 1)}[kind], S, S, device="cuda", dtype=dtype)

def call(x, in_place, **options):
    """A function whose plan was made with this switch. Plans are kept by shape: it makes them again if the other switch made the last one."""
    q, k, v, bias = x
    def prepare():
        plans.plans.clear(); row_pitch.IN_PLACE = in_place
        for _ in range(3): f()
    def f():
        with torch.no_grad(): return flashsci.attention(q, k, v, bias=bias, backend="cuda", **options)
    return prepare, f

def exact(x, causal=False):
    q, k, v, bias = x
    parts = []
    for b in range(B):
        s = q[b].double() @ k[b].double().mT * q.shape[-1] ** -0.5 + bias[b % bias.shape[0]].double()
        if causal: s = s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -torch.inf)
        parts.append(s.softmax(-1) @ v[b].double())
    return torch.stack(parts)

print("kernels, in place:")
for S, D in ((1023, 64), (1023, 128), (2047, 64), (1023, 192)):
    x = made(S, D)
    row_pitch.IN_PLACE = True
    scalars = Scalars(-1, -1, D**-0.5, 0.0, -1, -1, False, 0.0, "default", False)
    print(" ", S, D, decisions.forward(Tensors(*x), scalars), decisions.reads_ragged_bias(Tensors(*x), scalars))

print("errors (in place, copy) / largest of the output; both should be alike, and the difference of the two 0:")
worst = 0.0
for S in (383, 1021, 1022, 1023, 1025, 1028):
    for D in (64, 128):
        for kind in ("heads", "batch", "all"):
            for dtype in (torch.bfloat16, torch.float32):
                for causal in (False, True):
                    x = made(S, D, dtype, kind)
                    found = []
                    for in_place in (True, False):
                        prepare, f = call(x, in_place, causal=causal)
                        prepare(); found.append(f())
                    e = exact(x, causal)
                    errors = [float((y.double() - e).abs().max() / e.abs().max()) for y in found]
                    same = torch.equal(*found)
                    worst = max(worst, errors[0])
                    if not same or errors[0] > 2 * errors[1] + 1e-3 or not errors[0] < 0.02:
                        print("  DIFFERENT", S, D, kind, dtype, "causal" if causal else "", errors, same, flush=True)
print(f"  worst in place {worst:.2e}")
x = made(1023, 64)
prepare, f = call(x, True); prepare(); first = f()
print("  200 repeats bitwise equal:", all(torch.equal(first, f()) for _ in range(200)))

print("S D kind dtype | in place, copy, next multiple of 64 (us) | in place / next, copy / next")
for kind, dtype in (("heads", torch.bfloat16), ("batch", torch.bfloat16), ("heads", torch.float32)):
    for S in (1023, 1024, 2047):
        for D in (64, 128):
            x, whole = made(S, D, dtype, kind), made(-(-S // 64) * 64, D, dtype, kind)
            pairs = {"in place": call(x, True), "copy": call(x, False), "next": call(whole, False)}
            found = {n: [] for n in pairs}
            for _ in range(5):  # by turns, each with its own plan
                for n, (prepare, f) in pairs.items():
                    prepare(); found[n].append(times({n: f}, rounds=3)[n])
            t = {n: sorted(y)[2] for n, y in found.items()}
            print(f"{S} {D} {kind} {str(dtype)[6:]} | {t['in place']:.1f} {t['copy']:.1f} {t['next']:.1f} | "
                  f"{t['in place'] / t['next']:.2f} {t['copy'] / t['next']:.2f}", flush=True)
print("small calls, which no copy serves (below FEWEST_SCORES): windows or older kernels, by generation")
for S, b, h in ((383, 1, 8), (255, 2, 8), (511, 1, 8)):
    for D in (32, 64):
        q, k, v = (torch.randn(b, h, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        bias = torch.randn(b, h, S, S, device="cuda", dtype=torch.bfloat16)
        def by(backend):
            def f():
                with torch.no_grad(): flashsci.attention(q, k, v, bias=bias, backend=backend)
            return f
        print(" ", S, D, {n: f"{y:.1f}" for n, y in times({n: by(n) for n in ("cuda:sm90", "cuda:sm80", "auto")}).items()}, flush=True)
