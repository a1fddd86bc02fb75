"""`flashsci.tune`: the fastest backend for each kind of call on this machine, found by timing the user's own calls."""

from __future__ import annotations

from types import TracebackType

from flashsci.call.plans import plans
from flashsci.choice import choose, differentiate, tuned, tuning


class tune:  # lower case, as torch.no_grad
    """A context in which the first call of each kind is timed on every backend that ``auto`` may take for it.

    Wrap one training step. Forward, and forward with backward where gradients are wanted, are timed with the call's own
    tensors. A backend that is more than 2 % faster than the choice of ``auto`` takes its place, in this process and in
    later ones: times are kept in a file of the machine, by GPU, versions and kernels. Outside of the context times are
    read and never measured.

    A kind of call is all that ``auto`` decides by: shapes, dtypes, options and the tensors that want gradients. Calls
    that name a backend are not timed, nor are those under ``torch.compile``, a transform of torch.func, a mode, a
    profiler or the capture of a CUDA graph; they use the times of earlier calls. Trials leave gradients, hooks, random
    numbers and the tensors of the program as they are. They need memory for one more call. A backend that runs out of
    it, or raises, is listed as failed.

    Args:
        verbose: print a line for each kind when it has been timed, and the table at the end, to stderr.

    The environment variable ``FLASHSCI_TUNE=1`` tunes a whole process, and prints the table when it ends;
    ``FLASHSCI_TUNE=0`` leaves the file of the machine unread. ``python -m flashsci tune script.py`` tunes a script.

    Raises:
        TypeError: verbose is no bool.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
        >>> with flashsci.tune() as tuned:
        ...     flashsci.attention(q, k, v).sum().backward()
        >>> print(tuned.table())  # doctest: +SKIP
        >>> "tuned on this" in flashsci.explain(q, k, v).evidence
        True
        >>> flashsci.tune.clear()
    """

    def __init__(self, *, verbose: bool = False) -> None:
        if not isinstance(verbose, bool):
            raise TypeError(
                f"verbose must be True or False, got {type(verbose).__name__}; "
                "write `with flashsci.tune(): step()`, with the step inside"
            )
        self._verbose = verbose
        self._session: tuning.Session | None = None  # of the last time that the context was entered

    def __enter__(self) -> tune:
        if self._session in tuning.active:
            raise RuntimeError("this flashsci.tune() is entered already; make another one: `with flashsci.tune():`")
        self._session = tuning.Session(self._verbose)
        tuning.start(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        tuning.stop(self._session)
        if self._verbose:
            tuning.report(self._session)

    def table(self) -> str:
        """The kinds of call that were timed: the choice before and now, their times, the gain, and what failed."""
        return tuning.table(self._session or tuning.Session())

    @staticmethod
    def clear() -> None:
        """Forget all times, in this process and in the file of the machine; the rules of ``auto`` decide again."""
        tuned.clear()
        choose.forget()
        differentiate.forget()
        plans.clear()
