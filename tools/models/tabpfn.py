"""TabPFN 2.6: a table as tokens [rows, groups of features], attention along rows (100,000 short sequences) and
then along columns (few long ones; rows to predict attend to those with labels, through one head of keys)."""

from __future__ import annotations

from functools import partial

import torch
from tabpfn.architectures import tabpfn_v2_6
from torch import Tensor

from tools.models.served import attention
from tools.models.step import (
    Results,
    Step,
    counted,
    drawn,
    loss,
    master,
    mixed,
    randomised,
    replaced,
)

DTYPES = (torch.bfloat16,)  # the dtype of the client; in float32 its long columns take minutes
SIZES = {
    "tiny": {"training": 40, "inference": 60, "features": 9, "layers": 1},
    "check": {"training": 600, "inference": 1_000, "features": 48, "layers": 2},
    "real": {"training": 20_000, "inference": 100_000, "features": 48, "layers": 2},
}


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """scaled_dot_product_attention of [B, S, H, D]; no chunks of 65,535 sequences, no copies."""
    out = attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


def patched():
    return replaced((tabpfn_v2_6, "scaled_dot_product_attention", _attention))


def build(size: str, dtype: torch.dtype, device: torch.device) -> list[Step]:
    n = SIZES[size]
    config = tabpfn_v2_6.TabPFNV2p6Config(nlayers=n["layers"], num_buckets=100)
    model = tabpfn_v2_6.get_architecture(config)
    # The embeddings of columns are constants, no parameters.
    model = randomised(model).to(device, master(dtype))

    def step(x: Tensor, y: Tensor, training: bool) -> Results:
        model.train(training)
        with mixed(dtype, device), torch.set_grad_enabled(training):
            out = model(x, y)
            if training:
                loss(out).backward()
        return {"predictions": out}

    steps = []
    for kind, training in (("training", True), ("inference", False)):
        rows, randn = n[kind], drawn()
        x = randn(rows, 1, n["features"]).to(device, master(dtype))
        y = randn(rows - rows // 10).to(device, master(dtype))
        name = "tabpfn" if training else "tabpfn-inference"
        about = f"{rows:,} rows of {n['features']} features, {counted(n['layers'], 'layer')}, {kind}"
        run = partial(step, x, y, training)
        steps.append(Step.of(name, about, "SDPA, chunks", model, run, patched))
    return steps
