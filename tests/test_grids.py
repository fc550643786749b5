"""The quick suite shows every value of every parameter, and runs a quarter of the seeds."""

import itertools

import pytest

from tests.grids import each_choice, few, few_setups, mark_wide

pytest_plugins = ["pytester"]
GRID = """
import pytest
from tests.grids import few

@pytest.mark.parametrize("a", "pqr")
@pytest.mark.parametrize(("b", "c"), [(1, 2), (1, 3), (2, 2)])
def test_grid(a, b, c): ...

@pytest.mark.parametrize("a", [1, 2, 3, 4])
def test_list(a): ...

@pytest.mark.parametrize("seed", [*range(12), 77, 99])
def test_seeds(seed): ...

@pytest.mark.parametrize("a", [True, False])
@pytest.mark.parametrize("b", few([1, 2, 3], 3))
def test_few(a, b): ...

@pytest.mark.wide
@pytest.mark.parametrize("a", [1, 2])
def test_wide(a): ...

def test_alone(): ...
"""


def ids(values):
    return [value.values for value in values if not value.marks]


def test_every_value_is_shown_by_as_few_cases_as_a_greedy_choice_finds():
    axes = {"a": range(3), "b": range(4), "c": range(2)}
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    chosen = each_choice(cases)
    assert len(chosen) == 4
    assert {item for i in chosen for item in cases[i].items()} == {(name, v) for name in axes for v in axes[name]}
    assert each_choice([]) == set()
    assert each_choice([{}]) == set()


def test_few():
    assert ids(few(["a", "b", "c"], "b")) == [("b",)]
    assert ids(few([{}, {"x": 1}, {"y": 1}], first=2)) == [({},), ({"x": 1},)]
    assert ids(few([(1, 2), (3, 4)], (3, 4))) == [(3, 4)]
    assert ids(few([(1, 2), (3, 4)], (3, 4), unpack=False)) == [((3, 4),)]
    assert [param.id for param in few_setups({"x": (1,), "y": (2,)}, "x")] == ["x", "y"]
    assert ids(few_setups({"x": (1,), "y": (2,)}, "y")) == [(2,)]
    with pytest.raises(AssertionError, match="'d'"):
        few(["a", "b"], "d")


def test_what_the_quick_suite_runs(pytester):
    items = pytester.getitems(GRID)
    mark_wide(items)
    kept = {item.name for item in items if item.get_closest_marker("wide") is None}
    assert len(items) == 9 + 4 + 14 + 6 + 2 + 1
    assert {name for name in kept if "grid" not in name} == {
        *(f"test_list[{a}]" for a in (1, 2, 3, 4)),
        *(f"test_seeds[{seed}]" for seed in (0, 1, 2, 77, 99)),
        "test_few[3-True]", "test_few[3-False]", "test_alone",
    }  # fmt: skip
    grid = [name.removeprefix("test_grid[").removesuffix("]").split("-", 2) for name in kept if "grid" in name]
    assert len(grid) == 3
    assert {case[-1] for case in grid} == set("pqr")
    assert {(case[0], case[1]) for case in grid} == {("1", "2"), ("1", "3"), ("2", "2")}
