"""Which cases of a grid the quick suite leaves out.

A test with one `@pytest.mark.parametrize` above another runs once for each combination of their values. The quick suite
keeps as few of them as show every value of every parameter once; the others have the mark `wide`. Cases of a single
`parametrize` are all different, so all are kept, unless `few` names those to keep, or the parameter is a `seed`: of
seeds from 0 on a quarter is kept. A test may also have the mark by itself.

Source of the choice: each-choice coverage, Ammann and Offutt, "Introduction to Software Testing", section 6.2.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def few[T](values: Collection[T], *quick: T, first: int = 0, unpack: bool = True) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which the quick suite has some only.

    Args:
      values: all values.
      quick: those of the quick suite.
      first: in place of `quick`, how many leading ones.
      unpack: a tuple has a value for each of several parameters; else it is one value.
    """
    assert all(value in values for value in quick), f"{quick}; expected some of {list(values)}"
    are_wide = [i >= first and value not in quick for i, value in enumerate(values)]
    params = [value if isinstance(value, tuple) and unpack else (value,) for value in values]
    return [_param(values, is_wide) for values, is_wide in zip(params, are_wide, strict=True)]


def few_setups(setups: Mapping[str, Sequence[Any]], *quick: str) -> list[Any]:
    """Likewise, of setups by name, which are the ids of the cases."""
    assert set(quick) <= set(setups), f"{quick}; expected some of {list(setups)}"
    return [_param(values, name not in quick, name) for name, values in setups.items()]


def _param(values: Sequence[Any], is_wide: bool, name: str | None = None) -> Any:
    return pytest.param(*values, id=name, marks=pytest.mark.wide if is_wide else ())


def mark_wide(items: Iterable[Any]) -> None:
    """Gives the mark `wide` to the cases that the quick suite leaves out.

    Args:
      items: of type `pytest.Item`.
    """
    grids: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("wide") is None:
            grids.setdefault((item.parent, item.originalname), []).append(item)
    for cases in grids.values():
        kept = each_choice([_values_of(case) for case in cases])
        if "seed" in cases[0].callspec.params:
            kept &= _few_seeds([case.callspec.params["seed"] for case in cases])
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("wide")


def _values_of(case: Any) -> dict[str, Hashable]:
    """What a case has of each `parametrize`, by the names of its parameters: the identity of the values."""
    params = case.callspec.params
    values: dict[str, Hashable] = {}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        values[names] = tuple(id(params[name.strip()]) for name in names.split(","))
    return values


def _few_seeds(seeds: Sequence[int]) -> set[int]:
    """The cases of the first quarter of the seeds, but of at least two, and of those that found a fault once."""
    counted = [seed for seed in dict.fromkeys(seeds) if seed in range(len(set(seeds)))]
    left_out = set(counted[max(2, len(counted) // 4) :])
    return {i for i, seed in enumerate(seeds) if seed not in left_out}


def each_choice(cases: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """As few cases as show every value of every parameter, by a greedy choice; the first of equals.

    Args:
      cases: per case, its value of each parameter.
    Returns:
      The positions of the chosen cases.
    """
    unseen = [set(case.items()) for case in cases]
    chosen: set[int] = set()
    while True:
        best = max(range(len(cases)), key=lambda i: len(unseen[i]), default=-1)
        if best < 0 or not unseen[best]:
            return chosen
        chosen.add(best)
        shown = set(unseen[best])
        for values in unseen:
            values -= shown
