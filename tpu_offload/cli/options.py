"""Parameter types that click lacks (several values, finite numbers) and mutually exclusive flags.

Commands with multi-value or exclusive flags are declared with `Command`.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

_BREAK = "\0"  # separates the values of a `MultiValue`; an argument of a process cannot contain it
_MAX = 2**31 - 1

input_file = click.Path(path_type=Path)  # existence is checked by the code that reads it


class FiniteFloat(click.FloatRange):
    """A finite number of at least `low`, 0 unless given, and at most `high`; a range alone lets NaN pass."""

    def __init__(self, low: float = 0.0, high: float | None = None) -> None:
        super().__init__(min=low, max=high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite", param, ctx)
        return number


class MultiValue(click.ParamType[tuple[Any, ...]]):
    """One or more values, separated by spaces; with `commas` also by commas."""

    name = "many"

    def __init__(self, of: click.ParamType[Any] | Callable[[str], Any], *, commas: bool = False) -> None:
        self._of = click.types.convert_type(of)
        self._separators = f"[{_BREAK},]" if commas else _BREAK

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """See `click.ParamType`."""
        if isinstance(value, tuple):
            return value
        return tuple(self._of.convert(part, param, ctx) for part in re.split(self._separators, value))


class Command(click.Command):
    """A command whose flags may take several values or exclude each other.

    Args:
      exclusive: groups of mutually exclusive parameters.
    """

    def __init__(self, *args: Any, exclusive: Sequence[Sequence[str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exclusive = exclusive

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`; joins the values of `--sizes 1 2` first."""
        many = {flag for param in self.params if isinstance(param.type, MultiValue) for flag in param.opts}
        joined: list[str] = []
        takes_more = False  # whether the last argument belongs to a multi-value flag
        for arg in args:
            is_flag = arg.startswith("-")
            if takes_more and not is_flag:
                joined[-1] += _BREAK + arg
            else:
                takes_more = not is_flag and not many.isdisjoint(joined[-1:])
                joined.append(arg)
        rest = super().parse_args(ctx, joined)
        for names in self._exclusive:
            given = [name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
            if len(given) > 1:
                one, other = (
                    param.get_error_hint(ctx) for name in given[:2] for param in self.params if param.name == name
                )
                raise click.UsageError(f"{one}: not allowed with {other}", ctx)
        return rest


class _Number(click.Option):
    """Omits from the help an upper bound that only keeps numbers within 32 bits."""

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """See `click.Option`."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.type, click.IntRange) and self.type.max == _MAX:
            extra.pop("range", None)
        return extra


type Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(flag: str, type_: Any, metavar: str | None, help_: str, **more: Any) -> Decorator:
    """Shorthand for `click.option`."""
    return click.option(flag, type=type_, metavar=metavar, help=help_, **more)


def number(flag: str, help_: str, *, low: int = 1, high: int = _MAX, default: int | None = None) -> Decorator:
    """An integer option, by default at least 1."""
    return click.option(flag, cls=_Number, type=click.IntRange(low, high), default=default, metavar="N", help=help_)
