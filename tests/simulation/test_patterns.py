"""Patterns match one place by syntax, and a replacement can use the nodes of the wildcards."""

import ast
import difflib

import pytest

from tests.simulation.patterns import PatternError, functions, replace

SOURCE = """
class Table:
    def end(self, job, *, bad=job.size):
        self.table.release(job.account, (  # as many
            job.size), late=False)
        if job.mode is LOAD and job.sent and job.early:
            self.index.unpin(job.keys)
            self.index.sweep()
        elif job.late:
            self.late[job.id] = job
        kept = [key for key in job.keys if key not in bad]
        return None if job.waiting else kept

    def other(self, job):
        job.size += 1
"""


def changes(find, new, source=SOURCE):
    """The lines that go and those that come, without their indentation."""
    tree = ast.parse(source)
    before = ast.unparse(tree).splitlines()
    replace(dict(functions(tree))["Table.end"], find, new)
    text = ast.unparse(ast.fix_missing_locations(tree))
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(ast.unparse(ast.parse(text))))
    lines = difflib.ndiff([line.strip() for line in before], [line.strip() for line in text.splitlines()])
    return [line[0] + line[2:] for line in lines if line[0] in "-+"]


RELEASE = "-self.table.release(job.account, job.size, late=False)"
TEST = "-if job.mode is LOAD and job.sent and job.early:"
LIST = "-kept = [key for key in job.keys if key not in bad]"
RETURN = "-return None if job.waiting else kept"


@pytest.mark.parametrize(
    ("find", "new", "expected"),
    [
        ("job.waiting", "False", [RETURN, "+return None if False else kept"]),
        ("None if _ else _1", "_1", [RETURN, "+return kept"]),
        ("return _", "return []", [RETURN, "+return []"]),
        ("_.waiting", "not _0", [RETURN, "+return None if not job.waiting else kept"]),
        ("[_1 for _1 in _2 if _]", "list(_2)", [LIST, "+kept = list(job.keys)"]),
        ("self.table.release(...)", "pass", [RELEASE, "+pass"]),
        ("self.table.release(...)", "", [RELEASE]),
        ("self.table.release(...)", "if x:\n    _0", ["+if x:"]),
        ("_.release(_1, ..., late=_)", "f(..., _1)", [RELEASE, "+f(job.size, job.account)"]),
        ("_.release(..., job.size)", "f(..., x=1)", [RELEASE, "+f(job.account, late=False, x=1)"]),
        ("... and job.early", "...", [TEST, "+if job.mode is LOAD and job.sent:"]),
        ("_ and ... and job.early", "...", [TEST, "+if job.sent:"]),
        ("_ is LOAD and ...", "x and ...", [TEST, "+if x and job.sent and job.early:"]),
        (
            "if _1:\n    ...\nelif _:\n    ...",
            "if x:\n    ...\n    if _1:\n        ...",
            [TEST, "+if x:", "-elif job.late:", "+if job.mode is LOAD and job.sent and job.early:"],
        ),
        (
            "self.index.unpin(_1)\nself.index.sweep()",
            "sweep(_1)",
            ["+sweep(job.keys)", "-self.index.unpin(job.keys)", "-self.index.sweep()"],
        ),
    ],
)  # fmt: skip
def test_what_is_replaced(find, new, expected):
    assert changes(find, new) == expected


def test_what_is_written_around_it_does_not_count():
    other = SOURCE.replace("None if job.waiting", "None if (  # still\n            job . waiting )").replace(
        "kept", "rest"
    )
    assert changes("None if job.waiting else _1", "_1", other) == [
        "-return None if job.waiting else rest",
        "+return rest",
    ]


@pytest.mark.parametrize(
    ("find", "new", "message"),
    [
        ("job.waits", "x", "`job.waits` does not match; nearest is line 12, `return None if job.waiting else kept`"),
        ("job.keys", "x", "`job.keys` matches 2 times, in lines 7, 11; expected once"),
        ("_.release(_1, _1, late=_)", "x", "does not match"),
        ("_.release(_, _)", "x", "does not match"),
        ("_.release(_, _, late=_, soon=_)", "x", "does not match"),
        ("_.release(_, _, _, ...)", "x", "does not match"),
        ("_.sent and _", "x", "does not match"),
        ("if _:\n    self.late[_] = _\nelse:\n    pass", "x", "does not match"),
        ("_(...)", "pass", "`_(...)` matches 3 times, in lines 4, 7, 8;"),
        ("return", "pass", "does not match"),
        ("job.size + 1", "x", "does not match"),
        ("job waiting", "x", "'job waiting' is not Python"),
        ("job.waiting", "_1", "the replacement has _1, but the pattern does not"),
        ("job.waiting", "f(...)", "the replacement has more"),
        ("_.release(...)", "...", "`...` is 3 nodes; expected 1"),
        ("if _:\n    ...\nelif _:\n    ...", "if x:\n    ...", "2 `...` and 1 in the replacement"),
        ("_.release(..., ...)", "x", "two `...`"),
        ("...\nreturn _", "pass", "must not have `...`"),
        ("", "pass", "must not have `...`"),
    ],
)
def test_what_does_not_fit_is_an_error_of_one_line(find, new, message):
    with pytest.raises(PatternError) as e:
        changes(find, new)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_functions_have_qualified_names():
    source = """
if True:
    def f(): ...
class A:
    class B:
        def f(self):
            def g(): ...
"""
    assert [name for name, _ in functions(ast.parse(source))] == ["f", "A.B.f", "A.B.f.g"]
