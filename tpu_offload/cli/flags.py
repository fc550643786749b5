"""Types of flags. A value that cannot be is an error that says what is allowed."""

import argparse
from collections.abc import Callable

_MAX = 2**31 - 1


def int_flag(low: int, high: int = _MAX) -> Callable[[str], int]:
    """An integer from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            allowed = f"of at least {low}" if high == _MAX else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r}; expected an integer {allowed}")
        return value

    return parse


def float_flag(low: float) -> Callable[[str], float]:
    """A finite number of at least `low`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least {low:g}")
        return value

    return parse


def list_flag[T](parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values with commas between them."""

    def parse_all(text: str) -> list[T]:
        return [parse(part) for part in text.split(",")]

    return parse_all
