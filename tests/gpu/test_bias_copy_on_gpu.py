"""Copies of a strided bias beside other kernels: on Hopper they are launched before the kernel that precedes them has ended."""

import pytest
import torch

from flashsci.call import bias_copy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("captured", (False, True), ids=("stream", "graph"))
@pytest.mark.parametrize("shape", ((1, 16, 384, 384), (1, 12, 250, 250), (256, 4, 32, 128)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_copy_waits_for_what_it_reads_and_is_waited_for(shape, dtype, captured):
    pytest.importorskip("triton")
    batch, heads, rows, keys = shape
    projected = torch.zeros(batch, rows, keys, heads, device="cuda", dtype=dtype)
    layer = torch.zeros(batch, rows, keys, 3 * heads, device="cuda", dtype=dtype)
    number = torch.zeros((), device="cuda")

    def step():
        number.add_(1)
        projected.copy_(number.expand(projected.shape))
        layer.copy_(number.expand(layer.shape))
        given = [x.permute(0, 3, 1, 2) for x in (projected, layer[..., heads : 2 * heads])]
        found = [bias_copy.copied(x) for x in given]
        back = bias_copy._fill(found[0], torch.empty_like(projected).permute(0, 3, 1, 2))
        return torch.stack([(x == number).all() for x in (*found, back)])

    assert step().all()
    run, seen = step, []
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()

        def run():
            graph.replay()
            return result.clone()

    for _ in range(50):  # bf16 holds every number up to 256
        seen.append(run())
    assert torch.stack(seen).all()
