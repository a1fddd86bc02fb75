"""Few queries of thousands of keys in fp32, head dims above 128: Triton's tiles as before, its wide heads, cuda, plain math, SDPA.

    python wide.py            the table, under 3 minutes of one H200
    python wide.py pieces     the sums over keys alone, by programs a processor and keys of a piece (a minute)

`old`: backend="triton" with wide heads up to 1,024 keys. us of the GPU, medians of interleaved blocks (the host is hidden); err: the
largest error over the largest number of fp64 math, of out, and of dq, dk, dv together.
"""
import itertools, math, statistics, sys, time
import torch, flashsci
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from flashsci.backends.triton import tilings
from flashsci.backends.triton.plans import dense
from flashsci.call import plans

torch.backends.cuda.matmul.allow_tf32 = False
NEW = tilings.is_wide, tilings.pieces_of
BUDGET, START = 165.0, time.time()


def old_limit(dims, q, k, group):
    return k <= 1024 and NEW[0](dims, q, k, group)


def switch(old: bool, pieces: bool = True) -> None:
    """Wide heads of up to 1,024 keys or as they are now. Plans that were made before are dropped, and so are their choices."""
    tilings.is_wide = old_limit if old else NEW[0]
    tilings.pieces_of = NEW[1] if pieces else lambda processors, programs, depth, step: (1, -(-depth // step) * step)
    dense.plan.cache_clear()
    plans.plans.clear()


def math_of(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def efficient(q, k, v):
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return sdpa(q, k, v)


def triton(q, k, v):
    return flashsci.attention(q, k, v, backend="triton")


def cuda(q, k, v):
    return flashsci.attention(q, k, v, backend="cuda")


# name: (function, before: old limit, pieces)
WAYS = {"old": (triton, True, True), "wide": (triton, False, True), "1 piece": (triton, False, False),
        "cuda": (cuda, False, True), "math": (math_of, False, True), "eff": (efficient, False, True)}


def made(B, H, Sq, Sk, D):
    make = lambda n: torch.randn(B, H, n, D, device="cuda").requires_grad_()
    return make(Sq), make(Sk), make(Sk)


def block(f, n):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_500_000)
    a.record()
    for _ in range(n):
        f()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / n * 1e3


def calls_of(x, dout, grad):
    """A function for each way, warm: it keeps the plan that it was made with, which `switch` no longer reaches."""
    found = {}
    for name, (f, old, pieces) in WAYS.items():
        def run(f=f):
            if grad:
                return torch.autograd.grad(f(*x), x, dout)
            with torch.no_grad():
                return f(*x)
        found[name] = run, old, pieces
    return found


def graphs(x, dout, grad):
    """The ways as CUDA graphs: each holds its own kernels, so that blocks of them may be interleaved."""
    made_graphs, refused = {}, {}
    for name, (run, old, pieces) in calls_of(x, dout, grad).items():
        switch(old, pieces)
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            made_graphs[name] = graph
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:80]}"
            torch.cuda.synchronize()
    switch(False)
    return made_graphs, refused


def times(x, dout, grad, rounds=7):
    ways, refused = graphs(x, dout, grad)
    found = {name: [] for name in ways}
    count = {name: max(2, min(20, int(2500 / max(block(g.replay, 2), 1)))) for name, g in ways.items()}
    for _ in range(rounds):
        for name, g in ways.items():
            found[name].append(block(g.replay, count[name]))
    return {name: statistics.median(t) for name, t in found.items()}, refused


def errors(x, dout):
    """By way: errors of out and of the gradients, over the largest number of each in fp64 math."""
    double = [t.detach().double().requires_grad_() for t in x]
    out = math_of(*double)
    truth = (out.detach(), *torch.autograd.grad(out, double, dout.double()))
    found = {}
    for name, (f, old, pieces) in WAYS.items():
        switch(old, pieces)
        try:
            got = f(*x)
            got = (got.detach(), *torch.autograd.grad(got, x, dout))
        except Exception:
            continue
        far = [float((a.double() - t).abs().max() / t.abs().max()) for a, t in zip(got, truth)]
        found[name] = far[0], max(far[1:])
    switch(False)
    return found


def table():
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'D':>4} {'BxH':>5} {'Sq':>3} {'Sk':>5} {'pass':>7} | " + " ".join(f"{n:>8}" for n in WAYS) + " | wide/old wide/best | err out, grads: wide, math")
    ratios = []
    shapes = list(itertools.product((160, 136, 256), (3, 17, 64, 95), (1500, 2048, 4096), ((1, 8), (4, 16))))
    # Corners first: whatever the time left, all of D, Sq, Sk and heads were seen.
    shapes.sort(key=lambda s: (s[0] != 160, s[2] == 1500, s[1] in (17, 64)))
    extra = [(160, 1, 8192, (1, 8)), (160, 95, 8192, (4, 16)), (160, 256, 4096, (1, 8)), (129, 17, 2047, (1, 8))]
    for D, Sq, Sk, (B, H) in [*shapes[:4], *extra, *shapes[4:]]:
        if time.time() - START > BUDGET:
            print("out of time")
            break
        torch.manual_seed(0)
        x = made(B, H, Sq, Sk, D)
        dout = torch.randn(B, H, Sq, D, device="cuda")
        far = errors(x, dout)
        for grad in (False, True):
            found, refused = times(x, dout, grad)
            best = min((t for n, t in found.items() if n in ("cuda", "math", "eff")), default=math.nan)
            line = " ".join(f"{found.get(n, math.nan):8.1f}" for n in WAYS)
            new = found.get("wide", math.nan)
            shown = " ".join(f"{far[n][0]:.1e} {far[n][1]:.1e}" for n in ("wide", "math") if n in far)
            print(f"{D:4} {B}x{H:<3} {Sq:3} {Sk:5} {'step' if grad else 'forward':>7} | {line} | {new / found.get('old', math.nan):8.2f} {new / best:9.2f} | {shown}", flush=True)
            for name, why in refused.items():
                print("    refused:", name, why)
            ratios.append((grad, new / found.get("old", math.nan), new / best))
    for grad in (False, True):
        some = [r[1:] for r in ratios if r[0] == grad and all(map(math.isfinite, r[1:]))]
        if some:
            print("step" if grad else "forward", "geometric means: wide/old, wide/best of the others",
                  *(f"{math.exp(statistics.mean(map(math.log, c))):.2f}" for c in zip(*some)), "worst", *(f"{max(c):.2f}" for c in zip(*some)))
    # Calls as large as few_scores takes: bits are the same every time.
    x = made(1, 8, 3, 4096, 160)
    dout = torch.randn(1, 8, 3, 160, device="cuda")
    one, two = (torch.autograd.grad(triton(*x), x, dout) for _ in range(2))
    print("same bits again:", all(torch.equal(a, b) for a, b in zip(one, two)))


def pieces():
    """The forward by programs a processor and least keys of a piece."""
    busy, least = tilings.BUSY, tilings.LEAST_PIECE
    for D, B, H, Sq, Sk in ((160, 1, 8, 3, 2048), (160, 1, 8, 3, 4096), (160, 1, 8, 64, 4096), (160, 4, 16, 3, 4096), (256, 1, 8, 17, 2048)):
        x, line = made(B, H, Sq, Sk, D), []
        for tilings.BUSY, tilings.LEAST_PIECE in itertools.product((1, 2, 4, 8, 16), (128, 256, 512)):
            switch(False)
            with torch.no_grad():
                for _ in range(3):
                    triton(*x)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    triton(*x)
            line.append(f"{tilings.BUSY}/{tilings.LEAST_PIECE} {statistics.median(block(graph.replay, 10) for _ in range(7)):.1f}")
        tilings.BUSY, tilings.LEAST_PIECE = busy, least
        print(D, f"{B}x{H}", Sq, Sk, "|", "  ".join(line), flush=True)


if __name__ == "__main__":
    pieces() if "pieces" in sys.argv[1:] else table()
