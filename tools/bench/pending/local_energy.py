# ruff: noqa
"""Local energy of examples/local_energy.py: the forward-Laplacian rule against plain PyTorch, on one GPU, at most 60 s.

    python tools/bench/pending/local_energy.py [--seconds 58] [--electrons 42] [--walkers 256]

Seconds for the Laplacian of log |psi| of all walkers, peak MiB beyond what lived before, and the largest error against
float64 for two walkers, over the largest value. A way does its work in chunks. One that would take more than --slice
seconds stops, and its time is multiplied. Plain ways have softmax(q k^T) v for attention. Their log-determinant is a
Function on the inverse: forward mode through torch.linalg.slogdet under vmap gives other numbers in torch 2.13.
"""

import argparse, sys, time

sys.path[:0] = [".", "examples"]
import torch
from torch.func import grad, hessian, jvp, vmap
import flashsci, local_energy as example

parser = argparse.ArgumentParser()
on_gpu = torch.cuda.is_available()
parser.add_argument("--seconds", type=float, default=58)
parser.add_argument("--slice", type=float, default=5)
parser.add_argument("--electrons", type=int, default=42 if on_gpu else 5)
parser.add_argument("--walkers", type=int, default=256 if on_gpu else 6)
parser.add_argument("--width", type=int, default=256 if on_gpu else 32)
given = parser.parse_args()
BEGIN, N = time.time(), 3 * given.electrons
device = "cuda" if on_gpu else "cpu"
synchronize = torch.cuda.synchronize if on_gpu else lambda: None


class LogDeterminant(torch.autograd.Function):
    """log |det x|, with derivatives of any order and mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.linalg.slogdet(x).logabsdet

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g[..., None, None] * torch.linalg.inv(ctx.saved_tensors[0]).mT

    @staticmethod
    def jvp(ctx, tangent):
        return (torch.linalg.inv(ctx.saved_tensors[0]).mT * tangent).sum((-1, -2))


def log_determinant(x, rule=example.log_determinant):
    return rule(x) if isinstance(x, example.Jet) else LogDeterminant.apply(x)


example.log_determinant = log_determinant
torch.manual_seed(0)
ansatz = example.Ansatz(given.electrons, given.width).to(device).requires_grad_(False)
positions = torch.randn(given.walkers, given.electrons, 3, device=device)
few = positions[:2]
directions = torch.eye(N, device=device).view(N, given.electrons, 3)


def along(x, way):
    """The second derivative along one coordinate, for each walker: forward over reverse."""
    way = way.expand_as(x)
    return (jvp(grad(lambda x: ansatz(x).sum()), (x,), (way,))[1] * way).sum((-1, -2))


def trace(x):
    return hessian(ansatz)(x).reshape(N, N).trace()


def rule(backend, walkers=1 << 30):
    def run(x):
        for part in x.split(walkers):
            with flashsci.use_backend(backend):
                yield ansatz(example.coordinates(part)).laplacian

    return run, lambda x: -(-len(x) // walkers), torch.cat


def loop():
    return lambda x: (along(x, way) for way in directions), lambda x: N, sum


def of_directions(chunk, walkers=1 << 30):
    """vmap of forward over reverse."""
    pieces = directions.split(chunk)

    def run(x):
        for part in x.split(walkers):
            found = 0
            for piece in pieces:
                found = found + vmap(along, (None, 0))(part, piece).sum(0)
            yield found

    return run, lambda x: -(-len(x) // walkers), torch.cat


def of_walkers(chunk):
    """vmap of torch.func.hessian."""
    return lambda x: (vmap(trace)(part) for part in x.split(chunk)), lambda x: -(-len(x) // chunk), torch.cat


WAYS = {
    "rule, auto": rule("auto"),
    "rule, auto, 128 walkers": rule("auto", 128),
    "rule, auto, 86 walkers": rule("auto", 86),
    "rule, auto, 64 walkers": rule("auto", 64),
    "rule, auto, 32 walkers": rule("auto", 32),
    "rule, blocks of PyTorch": rule("reference"),
    "vmap of jvp over grad, 21 directions": of_directions(21),
    "vmap of jvp over grad, 63 directions": of_directions(63),
    "vmap of jvp over grad, 126, 64 walkers": of_directions(126, 64),
    "vmap of jvp over grad, 63, 64 walkers": of_directions(63, 64),
    "vmap of jvp over grad, 42 directions": of_directions(42),
    "vmap of hessian, 32 walkers": of_walkers(32),
    "vmap of hessian, 64 walkers": of_walkers(64),
}
ansatz.double()
exact = ansatz(example.coordinates(few.double())).laplacian
torch.testing.assert_close(exact[0], trace(few[0].double()))
ansatz.float()
print(torch.cuda.get_device_name() if on_gpu else "CPU", torch.__version__, vars(given))
print(f"{'way':38s} {'s':>9s} {'MiB':>9s} {'error':>8s} {'done':>6s}")
with torch.no_grad():
    for name, (run, count, joined) in WAYS.items():
        if time.time() - BEGIN > given.seconds - given.slice:
            print(f"{name:38s} out of time")
            continue
        try:
            found = joined(list(run(few)))
            error = ((found - exact).abs().max() / exact.abs().max()).item()
            next(iter(run(positions)))  # its memory is in the allocator's cache afterwards
            synchronize()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            start, done = time.perf_counter(), 0
            for _ in run(positions):
                synchronize()
                done += 1
                if time.perf_counter() - start > given.slice:
                    break
            share = done / count(positions)
            seconds = (time.perf_counter() - start) / share
            mib = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else 0.0
            print(f"{name:38s} {seconds:9.3f} {mib:9.0f} {error:8.1e} {share:6.2f}", flush=True)
        except torch.OutOfMemoryError:
            print(f"{name:38s} out of memory")
        if on_gpu:
            torch.cuda.empty_cache()
print(f"{time.time() - BEGIN:.0f} s")
