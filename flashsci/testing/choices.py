"""Sources of random choices: a seeded generator, or Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
DrawnCase = TypeVar("DrawnCase")


class Choices(Protocol):
    """The source of a case's choices: a seeded generator or Hypothesis' ``draw``."""

    def one_of(self, options: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int: ...


class SeededChoices:
    """Choices of a pseudo-random generator: the same seed, the same cases, on every machine."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


def strategy_of(draw_one: Callable[[Choices], DrawnCase]) -> Any:
    """A Hypothesis strategy of the cases that a function draws from choices (needs hypothesis)."""
    from hypothesis import strategies as st

    class Drawn:
        def __init__(self, draw: Callable[..., Any]):
            self.draw = draw

        def one_of(self, options: Sequence[T]) -> T:
            return self.draw(st.sampled_from(list(options)))

        def integer(self, low: int, high: int) -> int:
            return self.draw(st.integers(low, high))

    @st.composite
    def strategy(draw: Callable[..., Any]) -> DrawnCase:
        return draw_one(Drawn(draw))

    return strategy()
