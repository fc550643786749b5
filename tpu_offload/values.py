"""Values from outside: numbers of whatever library, and objects of which nothing is sure, not even their repr."""

import operator
from typing import Any

import numpy as np


def as_integer(value: Any) -> int | None:
    """The integer of Python that this is, which numpy's and those of other libraries are as well; None if it is none.

    A boolean is none.
    """
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except Exception:  # the object is not ours
        return None


def as_count(value: Any, *, least: int = 0) -> int | None:
    """The same, and None if it is less than `least` or has more than 63 bits."""
    count = as_integer(value)
    return count if count is not None and least <= count < 2**63 else None


def one_line(value: object) -> str:
    """What a message says of a value: at most 100 characters in one line."""
    try:
        words = str(value) if isinstance(value, Exception) else repr(value)
    except Exception:  # the object is not ours
        words = f"a {type(value).__name__}"
    return " ".join(words.split())[:100]
