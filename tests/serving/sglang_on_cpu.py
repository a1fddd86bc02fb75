"""SGLang's engine on the CPU. Its processes, which are spawned, import this file before anything of SGLang: what keeps SGLang
from starting without CUDA is mended here."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import torch

os.environ |= dict(
    SGLANG_USE_CPU_ENGINE="1",
    HF_HUB_OFFLINE="1",
    TRITON_INTERPRET="1",  # SGLang gives tokens their slots with Triton kernels
    PYTHONWARNINGS="ignore",  # of each process, of what there is no GPU for
)

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # SGLang and transformers import it for images. PyPI's is compiled for CUDA's torch: beside torch for the CPU its operators
    # are missing, and two of them it must find declared.
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Kernels(ModuleType):
    """SGLang's own kernels: PyPI has them compiled for CUDA only. Their names are imported when SGLang starts; on a CPU without
    them it computes with torch, and nothing that the tests do calls one."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


sys.modules["sgl_kernel"] = Kernels("sgl_kernel")


def scheduler(*arguments, **options):
    """SGLang's scheduler and model, where attention is computed; every call of flashsci's is a line of the file $CALLS: its
    longest query, and where its block table lies."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from flashsci.integrations import sglang as integration

    paged = integration.paged_attention

    def counted(query, *arguments, **options):
        with open(os.environ["CALLS"], "a") as file:
            print(options["max_seqlen_q"], options["block_table"].data_ptr(), file=file)
        return paged(query, *arguments, **options)

    integration.paged_attention = counted
    run_scheduler_process(*arguments, **options)


def detokenizer(*arguments, **options):
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **options)


def engine(folder, **options):
    """Of the model in ``folder``. Where its scheduler fails, SGLang prints why and ends this process."""
    from sglang.srt.entrypoints.engine import Engine

    class OnCPU(Engine):
        run_scheduler_process_func = staticmethod(scheduler)
        run_detokenizer_process_func = staticmethod(detokenizer)

    defaults = dict(
        device="cpu", dtype="float32", skip_tokenizer_init=True, attention_backend="fsci", page_size=16,
        chunked_prefill_size=32, max_running_requests=4, max_total_tokens=1024, context_length=128,
    )  # fmt: skip
    return OnCPU(model_path=str(folder), **defaults | options)
