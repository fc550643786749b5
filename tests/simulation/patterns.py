"""Finds one place in a function by its syntax and replaces it.

A pattern is a piece of Python, parsed and compared node by node: one expression, or statements in a row. Comments, line
breaks, quotes, redundant parentheses and the order of keyword arguments are ignored, and so is the rest of the
function. Wildcards:

    _             an expression
    _1, _2, ...   an expression that the replacement uses under the same name; two of one name are equal
    ...           any number of arguments, elements, operands of `and` or `or`, or statements of a body; the
    replacement's `...` stands for the same

In a replacement `_0` stands for the whole match. A statement pattern's replacement may be empty.

    find                              replacement
    self._index.unpin(...)            if job.state is not JobState.FAILED:
                                          _0
    _1 in pins or ...                 ...
    None if _ else _1                 _1
    Plan(..., epoch=_)                Plan(...)
"""

import ast
import copy
import dataclasses
import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

_HOLE = re.compile(r"_\d*")
_IGNORED = ("ctx", "kind", "type_comment")


class PatternError(ValueError):
    """A pattern does not occur exactly once, or is invalid. The message is one line."""


@dataclasses.dataclass
class _Match:
    """The nodes that a pattern's wildcards matched at one place.

    Attributes:
      exprs: by name, `_1` and so on.
      runs: the nodes of each `...`, in order. For a call they are its arguments, keywords last.
      operators: for each run, the operator that joins its expressions: `and`, `or` or none.
    """

    exprs: dict[str, ast.expr] = dataclasses.field(default_factory=dict)
    runs: list[list[ast.AST]] = dataclasses.field(default_factory=list)
    operators: list[ast.boolop | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Place:
    """Consecutive nodes of one field of a parent: one expression, or statements."""

    parent: ast.AST
    field: str
    first: int
    nodes: Sequence[ast.AST]
    match: _Match

    @property
    def line(self) -> int:
        return getattr(self.nodes[0], "lineno", 0)

    def replace(self, new: Sequence[ast.AST]) -> None:
        value = getattr(self.parent, self.field)
        if isinstance(value, list):
            value[self.first : self.first + len(self.nodes)] = new
        else:
            (node,) = new
            setattr(self.parent, self.field, node)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """All functions of a module, by qualified name without `<locals>`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | Function):
            name = f"{prefix}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def replace(function: Function, find: str, new: str) -> None:
    """Replaces the single match in a function.

    Raises:
      PatternError: there is no match or more than one (the message has the nearest ones), or the pattern is invalid.
    """
    pattern, replacement = _parse(find), _parse(new)
    match pattern, replacement:
        case [ast.Expr() as wanted], [ast.Expr() as other]:
            places = list(_expressions(function, wanted.value))
        case _:
            if not pattern or any(map(_is_run, pattern)):
                raise PatternError("a pattern of statements must not have `...` as a statement")
            places = list(_statements(function, pattern))
    sought = _one_line(pattern)
    if not places:
        line, nearest = _nearest(function, sought)
        raise PatternError(f"`{sought}` does not match; nearest is line {line}, `{nearest}`")
    if len(places) > 1:
        lines = ", ".join(str(place.line) for place in places)
        raise PatternError(f"`{sought}` matches {len(places)} times, in lines {lines}; expected once")
    (place,) = places
    filler = _Filler(place)
    place.replace([filler.fill(other.value)] if isinstance(place.nodes[0], ast.expr) else filler.fill_all(replacement))
    filler.check()


def _parse(text: str) -> list[ast.stmt]:
    text = textwrap.dedent(text).strip()
    try:
        return ast.parse(text).body
    except SyntaxError as e:
        raise PatternError(f"{text!r} is not Python: {e.msg}") from e


# Finding.


def _fields(function: Function) -> Iterator[tuple[ast.AST, str, object]]:
    """The fields of all nodes in a function's body, without its arguments and decorators."""
    yield function, "body", function.body
    for statement in function.body:
        for node in ast.walk(statement):
            for field, value in ast.iter_fields(node):
                yield node, field, value


def _expressions(function: Function, pattern: ast.expr) -> Iterator[_Place]:
    for parent, field, value in _fields(function):
        for i, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.expr):
                match = _Match()
                if _matches(pattern, node, match):
                    yield _Place(parent, field, i, [node], match)


def _statements(function: Function, pattern: Sequence[ast.stmt]) -> Iterator[_Place]:
    for parent, field, value in _fields(function):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            for i in range(len(value) - len(pattern) + 1):
                nodes, match = value[i : i + len(pattern)], _Match()
                if all(_matches(p, node, match) for p, node in zip(pattern, nodes, strict=True)):
                    yield _Place(parent, field, i, nodes, match)


def _matches(pattern: object, node: object, match: _Match) -> bool:
    if isinstance(pattern, ast.Name) and _HOLE.fullmatch(pattern.id):
        if not isinstance(node, ast.expr):
            return False
        return pattern.id == "_" or _same(match.exprs.setdefault(pattern.id, node), node)
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_all(pattern, node, match)
    if type(pattern) is not type(node):
        return False
    if not isinstance(pattern, ast.AST):
        return pattern == node
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        return _matches(pattern.func, node.func, match) and _match_arguments(pattern, node, match)
    operator = pattern.op if isinstance(pattern, ast.BoolOp) else None
    for field in pattern._fields:
        if field not in _IGNORED:
            wanted, value = getattr(pattern, field), getattr(node, field)
            if isinstance(wanted, list) and isinstance(value, list):
                if not _match_all(wanted, value, match, operator=operator):
                    return False
            elif not _matches(wanted, value, match):
                return False
    return True


def _match_all(
    patterns: Sequence[ast.AST], nodes: Sequence[ast.AST], match: _Match, *, operator: ast.boolop | None = None
) -> bool:
    """Whether the nodes match one by one; a `...` matches all remaining ones."""
    runs = [i for i, pattern in enumerate(patterns) if _is_run(pattern)]
    if len(runs) > 1:
        raise PatternError("two `...` in one list; expected at most one")
    if not runs:
        return len(patterns) == len(nodes) and all(
            _matches(pattern, node, match) for pattern, node in zip(patterns, nodes, strict=True)
        )
    first = runs[0]
    end = len(nodes) - (len(patterns) - first - 1)
    if end < first or not _match_all(patterns[:first], nodes[:first], match):
        return False
    match.runs.append(list(nodes[first:end]))
    match.operators.append(operator)
    return _match_all(patterns[first + 1 :], nodes[end:], match)


def _match_arguments(pattern: ast.Call, node: ast.Call, match: _Match) -> bool:
    """Whether a call's arguments match: keywords by name; a `...` allows others."""
    wanted = {keyword.arg: keyword.value for keyword in pattern.keywords}
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    others: list[ast.AST] = [keyword for keyword in node.keywords if keyword.arg not in wanted]
    first = next((i for i, argument in enumerate(pattern.args) if _is_run(argument)), len(node.args))
    if not _match_all(pattern.args, [*node.args[:first], *others, *node.args[first:]], match):
        return False
    return all(name in given and _matches(value, given[name], match) for name, value in wanted.items())


def _is_run(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _same(a: ast.AST, b: ast.AST) -> bool:
    return ast.unparse(a) == ast.unparse(b)  # ignores whether it is loaded or stored


# Replacing.


class _Filler:
    """Copies a replacement's nodes, replacing wildcards by the matched nodes."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._num_runs_used = 0

    def check(self) -> None:
        num_runs = len(self._place.match.runs)
        if self._num_runs_used not in (0, num_runs):
            raise PatternError(
                f"{num_runs} `...` and {self._num_runs_used} in the replacement; expected the same number, or 0"
            )

    def fill_all(self, nodes: Sequence[ast.AST]) -> list[ast.AST]:
        filled: list[ast.AST] = []
        for node in nodes:
            match node:
                case ast.Expr(value=ast.Name(id="_0")):
                    filled += copy.deepcopy(list(self._place.nodes))
                case _ if _is_run(node):
                    filled += self._next_run()
                case _:
                    filled.append(self.fill(node))
        return filled

    def fill(self, node: ast.AST) -> ast.AST:
        """Fills one node that stands for a single node."""
        if isinstance(node, ast.Name) and _HOLE.fullmatch(node.id):
            return copy.deepcopy(self._expr(node.id))
        if _is_run(node):
            return self._run_as_expr()
        if isinstance(node, ast.Call):
            func: Any = self.fill(node.func)
            arguments: list[Any] = self.fill_all([*node.args, *node.keywords])
            keywords = [a for a in arguments if isinstance(a, ast.keyword)]
            return ast.Call(func, [a for a in arguments if not isinstance(a, ast.keyword)], keywords)
        fields = {}
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                value = self.fill_all(value)
            elif isinstance(value, ast.AST):
                value = self.fill(value)
            fields[field] = value
        filled = type(node)(**fields)
        return filled.values[0] if isinstance(filled, ast.BoolOp) and len(filled.values) == 1 else filled

    def _expr(self, name: str) -> ast.AST:
        if name == "_0" and isinstance(self._place.nodes[0], ast.expr):
            return self._place.nodes[0]
        if name not in self._place.match.exprs:
            raise PatternError(f"the replacement has {name}, but the pattern does not")
        return self._place.match.exprs[name]

    def _next_run(self) -> list[ast.AST]:
        self._num_runs_used += 1
        if self._num_runs_used > len(self._place.match.runs):
            raise PatternError("the replacement has more `...` than the pattern")
        return copy.deepcopy(self._place.match.runs[self._num_runs_used - 1])

    def _run_as_expr(self) -> ast.AST:
        run: list[Any] = self._next_run()
        operator: Any = self._place.match.operators[self._num_runs_used - 1]
        if len(run) != 1 and (operator is None or not run):
            raise PatternError(
                f"`...` is {len(run)} nodes; expected 1 where the replacement uses it as a single expression"
            )
        return run[0] if len(run) == 1 else ast.BoolOp(operator, run)


# Messages.


def _one_line(nodes: Sequence[ast.AST]) -> str:
    return "; ".join(" ".join(ast.unparse(node).split()) for node in nodes)


def _nearest(function: Function, sought: str) -> tuple[int, str]:
    """The line and text of the statement most similar to a pattern."""
    lines = {
        " ".join(ast.unparse(node).split())[: 2 * len(sought) + 20]: node.lineno
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt)
    }
    (nearest,) = difflib.get_close_matches(sought, lines, n=1, cutoff=0.0)
    return lines[nearest], nearest
