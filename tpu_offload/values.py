"""Conversion of untrusted values: integers of any library, and objects whose very repr may raise."""

import operator
from typing import Any

import numpy as np


def as_integer(value: Any) -> int | None:
    """The value as a Python int, also from numpy and other libraries; None if it is not an integer. Bools are not."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except Exception:  # a caller's object may raise anything
        return None


def as_count(value: Any, *, least: int = 0) -> int | None:
    """Like `as_integer`, but None if it is less than `least` or has more than 63 bits."""
    count = as_integer(value)
    return count if count is not None and least <= count < 2**63 else None


def one_line(value: object) -> str:
    """A value for an error message: at most 100 characters, in one line."""
    try:
        words = str(value) if isinstance(value, Exception) else repr(value)
    except Exception:  # a caller's object may raise anything
        words = f"a {type(value).__name__}"
    return " ".join(words.split())[:100]


def error_text(error: BaseException) -> str:
    """An error for the message of another: its type, and what it says as in `one_line`."""
    return f"{type(error).__name__}: {one_line(error)}"


def error_line(error: BaseException) -> str:
    """An error for a report: its type and the whole of its first line; one of the user's own class may have none."""
    try:
        text = str(error)
    except Exception:
        text = "it cannot be printed"
    return f"{type(error).__name__}: {text.strip()}".splitlines()[0]
