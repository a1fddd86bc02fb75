"""Shared by all tests: without a GPU Triton interprets, seeds come from test ids, memory is poison."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from typing import Any

import pytest
import torch

import flashsci

flashsci.attention  # noqa: B018  (binds every public name, before a test hides the package's files)
os.environ.pop("FLASHSCI_BACKEND", None)
os.environ["FLASHSCI_TUNE"] = "0"  # times of this machine decide no test
CACHE = tempfile.TemporaryDirectory(prefix="flashsci-tests-")
os.environ["FLASHSCI_CACHE"] = CACHE.name
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton decides at import whether to interpret; processes that tests start decide for themselves.
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton.experimental.gluon  # noqa: F401  (Triton imports it at the first launch)

        import flashsci.backends.triton
    if before is None:
        del os.environ["TRITON_INTERPRET"]

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    settings = None
else:
    PROFILE = dict(
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.register_profile("flashsci", derandomize=True, **PROFILE)
    settings.register_profile("flashsci-seeded", derandomize=False, **PROFILE)
    settings.load_profile("flashsci")


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in every run, but with --hypothesis-seed those of that seed: Hypothesis does not look at a
    seed where its profile is derandomised."""
    if settings is not None and config.getoption("--hypothesis-seed", None) is not None:
        settings.load_profile("flashsci-seeded")


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Applies the marker ``every``; and leaves out tests/cpu where a GPU is in sight: a process that sees one does not
    interpret Triton on the CPU."""
    _mark_rest(items)
    if not torch.cuda.is_available():
        return
    reason = "a GPU is in sight: run tests/cpu with CUDA_VISIBLE_DEVICES= (`make test` does)"
    for item in items:
        if "tests/cpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


def _mark_rest(items: list[pytest.Item]) -> None:
    """Marks as slow, and as the rest, all but one in n cases of each function with the marker ``every(n)``, and at least one of each
    function: the same cases in every run, but others for each number in FLASHSCI_SHARE."""
    share = int(os.environ.get("FLASHSCI_SHARE", "0"))
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every") is not None:
            cases.setdefault(getattr(item, "function", item), []).append(item)
    for of_function in cases.values():
        drawn = sorted(of_function, key=lambda item: zlib.crc32(item.nodeid.encode()))
        marker = drawn[0].get_closest_marker("every")
        assert marker is not None
        (n,) = marker.args
        count = -(-len(drawn) // n)
        first = share * count % len(drawn)
        for item in (drawn + drawn)[first + count : first + len(drawn)]:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.rest)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """torch's generators seeded from the test's id, so that a test draws the same alone and in a crowd."""
    number = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(number)
    return number


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> None:
    """For tests with a parameter ``backend``: one that this machine lacks is a reason to skip, never a pass."""
    from flashsci.choice import backends

    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if name not in (None, "auto"):  # auto is always there
        reason = backends.find(name).unavailable()
        if reason is not None:
            pytest.skip(f"{name}: {reason}")


@pytest.fixture
def poison():
    """torch.empty and its relatives return NaN during the test."""
    from flashsci.testing import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture
def fresh_choices(monkeypatch: pytest.MonkeyPatch):
    """The choice of backends, which has warned of nothing and decided nothing."""
    from flashsci import attention as _  # noqa: F401  (binds the public names)
    from flashsci.choice import choose

    for name in ("_warned", "_choices"):
        monkeypatch.setattr(choose, name, type(getattr(choose, name))())
    from flashsci.call.plans import plans

    saved = dict(plans)
    plans.clear()
    yield choose
    plans.clear()
    plans.update(saved)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """Replaces functions of a backend's module: for every call from here on, prepared ones too."""
    from flashsci.call.plans import plans

    def replace(module, **functions):
        plans.clear()
        for name in ("prepared_forward", "prepared_backward"):
            monkeypatch.delattr(module, name, raising=False)
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)

    yield replace
    plans.clear()
