"""Files that take long are started first; the list in `conftest` names files that exist."""

from pathlib import Path
from types import SimpleNamespace

from tests import conftest

ROOT = Path(__file__).parents[1]


def test_the_files_exist():
    assert [path for path in (*conftest.LONGEST_FIRST, *conftest.OF_COMPILED) if not (ROOT / path).exists()] == []
    assert len(set(conftest.LONGEST_FIRST)) == len(conftest.LONGEST_FIRST)


def test_only_with_several_processes():
    last, other, first = paths = [conftest.LONGEST_FIRST[1], "tests/test_order.py", conftest.LONGEST_FIRST[0]]
    for config, expected in [
        (SimpleNamespace(), paths),
        (SimpleNamespace(workerinput={}), [first, last, other]),
    ]:
        items = [SimpleNamespace(location=(path, 0, "")) for path in paths]
        conftest.longest_first(config, items)
        assert [item.location[0] for item in items] == expected
