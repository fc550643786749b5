"""Shrinks a failing trace: delta debugging over its actions, then smaller numbers and a smaller setup.

References:
  Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (ddmin).
"""

import dataclasses
import functools
import itertools
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.trace import Action, Setup
from tests.simulation.world import World

_SIMPLER = (
    {"num_rows": 0, "segment_slots": 0},
    {"missing_segments": (0, 0, 0, 0)},
    {"windows": ()},
    {"num_salts": 1},
    {"max_drafts": 0},
    {"decode_save": False},
    {"num_swap_blocks": 0},
    {"growth": 1000},
)


def failure(setup: Setup, actions: list[Action], *, log: Callable[[str], None] | None = None) -> tuple[str, int]:
    """The violation of a run, and the number of actions before it; empty without a violation."""
    world = World(setup, log=log)
    done = 0
    try:
        for action in actions:
            world.act(action)
            done += 1
        world.finish()
    except Exception as e:
        return failure_of(e), done + 1
    return "", done


def failure_of(error: Exception) -> str:
    """An exception in one line; with its location if it has no message."""
    text = " ".join(str(error).split())
    if not text and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
    return f"{type(error).__name__}: {text}"


def kind_of(violation: str) -> str:
    """The violation without numbers and names."""
    return re.sub(r"\br?\d+\b", "#", violation)[:60]


def minimal(setup: Setup, actions: list[Action], *, num_runs: int = 1000) -> tuple[Setup, list[Action], str]:
    """A short trace with the same kind of violation as a failing one; the shortest found in so many runs."""
    violation, end = failure(setup, actions)
    kind = kind_of(violation)
    found, runs = [violation], itertools.count(1)

    def fails(tried_setup: Setup, tried: list[Action]) -> bool:
        if next(runs) > num_runs:
            return False
        what, _ = failure(tried_setup, tried)
        if kind_of(what) == kind:
            found[0] = what
            return True
        return False

    actions = actions[:end]
    size = None
    while size != len(actions):
        size = len(actions)
        actions = _without(actions, functools.partial(fails, setup))
        for changes in _simpler(setup):
            simpler = dataclasses.replace(setup, **changes)
            if simpler != setup and fails(simpler, actions):
                setup = simpler
        actions = _with_zeros(actions, functools.partial(fails, setup))
    return setup, actions, found[0]


def _without(actions: list[Action], fails: Callable[[list[Action]], bool]) -> list[Action]:
    length = max(1, len(actions) // 2)
    while True:
        start, removed = 0, False
        while start < len(actions):
            tried = actions[:start] + actions[start + length :]
            if fails(tried):
                actions, removed = tried, True
            else:
                start += length
        if length == 1 and not removed:
            return actions
        length = max(1, length // 2)


def _with_zeros(actions: list[Action], fails: Callable[[list[Action]], bool]) -> list[Action]:
    for i, (kind, a, b) in enumerate(actions):
        for simpler in ((kind, 0, 0), (kind, a, 0), (kind, 0, b)):
            tried = [*actions[:i], simpler, *actions[i + 1 :]]
            if simpler != actions[i] and fails(tried):
                actions = tried
                break
    return actions


def _simpler(setup: Setup) -> Iterator[dict[str, Any]]:
    yield from _SIMPLER
    yield from ({"windows": (window,)} for window in setup.windows)
    for num_workers in range(1, setup.num_workers):
        yield {"num_workers": num_workers}
    yield {"delays": (0, 0, 0, 0)}
    yield {"report_delays": (0, 0, 0, 0)}
    yield {"staged": 0}
    yield {"staged": 255}
    yield {"num_staging_blocks": 32}


def explain(setup: Setup, actions: list[Action]) -> list[str]:
    """The trace with one line per action, each followed by its events."""
    lines = [f"setup: {setup}"]
    world = World(setup, log=lambda line: lines.append(f"    {line}"))
    try:
        for i, (kind, a, b) in enumerate(actions):
            lines.append(f"{i + 1}. {kind} {a} {b}" if kind != "step" else f"{i + 1}. step {world.num_steps + 1} ({a})")
            world.act((kind, a, b))
        lines.append("the end")
        world.finish()
    except Exception as e:
        lines.append(f"VIOLATION: {failure_of(e)}")
    return lines
