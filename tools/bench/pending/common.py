"""Medians of interleaved GPU times; each function runs back to back within a block so that the host is hidden."""
import statistics, torch
def times(functions, rounds=9, inner=None):
    def once(f, n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # hides the host
        a.record()
        for _ in range(n): f()
        b.record(); b.synchronize()
        return a.elapsed_time(b) / n * 1e3
    for f in functions.values():
        for _ in range(3): f()
    n = {k: max(1, min(20, int(4000 / max(once(f, 2), 1)))) for k, f in functions.items()}
    found = {k: [] for k in functions}
    for _ in range(rounds):
        for k, f in functions.items(): found[k].append(once(f, n[k]))
    return {k: statistics.median(v) for k, v in found.items()}
