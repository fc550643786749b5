"""Resets of the cache in runs that a seed repeats."""

import random
from typing import Any

from tests.inside.scheduler import tier_context


def draw_from(seed: str, scheduler: Any) -> None:
    """Has the resets of a scheduler change its keys alike in each run of a seed.

    Otherwise they are random, and so is which of them share a counter of a sketch.
    """
    rng = random.Random(f"{seed} resets")
    tier_context(scheduler).keys.draw_epoch = lambda: rng.getrandbits(63) + 1
