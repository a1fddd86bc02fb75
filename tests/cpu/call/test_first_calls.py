"""First calls of many threads in a fresh process: whoever comes second waits for what the first one loads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PREAMBLE = """
    import sys, threading, time
    sys.setswitchinterval(1e-6)

    def together(calls):
        '''Runs the calls in a thread each, released at once; raises what the first of them raises.'''
        barrier, errors = threading.Barrier(len(calls)), []

        def run(call):
            barrier.wait()
            try:
                call()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        [t.start() for t in threads]
        [t.join(240) for t in threads]
        assert not any(t.is_alive() for t in threads), "deadlock"
        if errors:
            raise errors[0]
"""


def fresh(code: str, **environment: str) -> str:
    """The output of a new process; its errors fail the test."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names():
    """`flashsci.attention` is the function from the first moment, never the module of that name."""
    fresh(
        """
        import torch, flashsci
        import importlib, types

        class Slow:  # threads meet between the end of a module's code and what its importer does next
            def find_spec(self, name, path=None, target=None):
                time.sleep(0.001)

        sys.meta_path.insert(0, Slow())
        names = ["attention", "varlen_attention", "attention_backward", "explain", "dropout_mask", "BackendError"]
        found = []

        def ask(name):
            for _ in range(2000):
                x = getattr(flashsci, name)
                assert not isinstance(x, types.ModuleType), f"flashsci.{name} is {x}"

        def bind():
            importlib.import_module("flashsci.api.attention")

        # As a module that imports flashsci.attention by itself does, while others use the package.
        together([bind] + [lambda n=n: ask(n) for n in names * 3])
        assert callable(flashsci.attention) and flashsci.attention.__module__ == "flashsci.api.attention"
        """
    )


def test_importing_the_module_does_not_hide_the_function():
    fresh(
        """
        import types
        import flashsci.api.attention
        assert not isinstance(flashsci.attention, types.ModuleType)
        from flashsci.api.attention import Plan
        assert sys.modules["flashsci.api.attention"].Plan is Plan
        """
    )


@pytest.mark.parametrize("outcome", ["absent", "broken", "loaded"])
def test_the_cuda_library(outcome):
    """Nobody is told that it is loaded, or why it is not, before that is so; it is loaded once."""
    fresh(
        f"""
        import pathlib, torch, types
        from flashsci.call import ops
        from flashsci.choice import backends
        from flashsci.backends.cuda import library as cuda

        outcome, loads, asked = {outcome!r}, [], []

        def find():
            loads.append(1)
            time.sleep(0.05)
            return None if outcome == "absent" else pathlib.Path("/nonexistent/_C.so")

        def load(path):
            time.sleep(0.05)
            if outcome == "broken":
                raise OSError("no such file")

        def sees_torch_cuda():
            asked.append(1)
            time.sleep(0.05)
            return True

        cuda.library_path = find
        if outcome == "loaded":
            op = types.SimpleNamespace(default=types.SimpleNamespace(name=lambda: "flashsci::op"))
            namespace = types.SimpleNamespace(
                load_library=load,
                flashsci=types.SimpleNamespace(
                    cuda_forward=op, cuda_backward=op, cuda_fp8_forward=op, sees_torch_cuda=sees_torch_cuda
                ),
            )
            class Name:  # what ctypes puts restype on
                def __init__(self, result): self.result = result
                def __call__(self): return self.result

            library = types.SimpleNamespace(
                flashsci_build_info=Name(b'{{"nvcc": "0"}}'), flashsci_driver_problem=Name(b"too old")
            )
            cuda.ctypes = types.SimpleNamespace(CDLL=lambda path: library, c_char_p=None)
            registered = []
            cuda.torch = types.SimpleNamespace(
                ops=namespace, cuda=types.SimpleNamespace(is_available=lambda: True), __version__="0", Tensor=torch.Tensor,
                library=types.SimpleNamespace(register_fake=lambda *a, **k: registered.append(a)),
            )
            cuda.register_vmap = lambda *a: time.sleep(0.01)
        else:
            torch.ops.load_library = load

        answers = []
        together([lambda: answers.append(backends.BACKENDS["cuda"].unavailable()) for _ in range(16)])
        expected = dict(absent="was not built", broken="cannot be loaded", loaded="cannot use this machine's driver")[outcome]
        assert all(a is not None and expected in a for a in answers), answers
        assert len(answers) == 16 and len(loads) == 1 and len(asked) <= 1
        assert outcome != "loaded" or (len(registered) == 3 and cuda.ops is not None)
        """
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "triton", "cuda"])
def test_calls_of_every_kind(backend):
    """Forward, gradients and second order; dense and packed; some threads by each entry. All agree with one alone."""
    fresh(
        f"""
        import warnings
        warnings.simplefilter("ignore")
        import torch, flashsci
        torch.set_num_threads(1)
        backend = {backend!r}
        q, k, v = torch.randn(3, 1, 2, 5, 16, generator=torch.Generator().manual_seed(1))
        offsets = torch.tensor([0, 2, 5], dtype=torch.int32)

        def dense():
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = flashsci.attention(*leaves, causal=True, backend=backend)
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            return [out, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

        def packed():
            if backend == "sdpa":
                return []
            leaves = [x[0].transpose(0, 1).clone().requires_grad_() for x in (q, k, v)]
            out = flashsci.varlen_attention(*leaves, offsets, backend=backend)
            return [out, *torch.autograd.grad(out.square().sum(), leaves)]

        def explained():
            flashsci.explain(q, k, v)
            return []

        found = []
        together([lambda c=c: found.append((c, c())) for c in (dense, packed, explained) * 5])
        for call, results in found:
            for a, b in zip(results, call(), strict=True):
                torch.testing.assert_close(a, b)
        assert len(found) == 15
        """,
        TRITON_INTERPRET="1",
    )


def test_a_fallback_warns_once():
    fresh(
        """
        import warnings
        from flashsci.choice import backends
        import torch, flashsci
        from flashsci.backends import cuda
        cuda.unavailable = lambda: "not here"
        x = torch.randn(1, 1, 3, 8)
        calls = [lambda n=n: flashsci.attention(x[..., :n, :], x, x, backend="cuda") for n in (1, 2, 3)] * 5
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            together(calls)
        assert len([w for w in seen if "not here" in str(w.message)]) == 1, seen
        """,
        TRITON_INTERPRET="1",
    )
