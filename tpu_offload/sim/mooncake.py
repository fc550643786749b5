"""Parses and validates lines of request traces in the Mooncake format."""

import dataclasses
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LENGTH = 2**31 - 1
"""Most tokens of a prompt or an answer."""

_MAX_FLOAT = sys.float_info.max  # larger integers cannot be converted to float


@dataclasses.dataclass(frozen=True, slots=True)
class TraceLine:
    """One request.

    Attributes:
      time_s: arrival time.
      input_length: tokens of the prompt; None if missing.
      output_length: tokens of the answer; None if missing.
      hash_ids: one id per block of the prompt.
    """

    time_s: float
    input_length: int | None
    output_length: int | None
    hash_ids: Sequence[int | str]


def parse_line(value: Any) -> TraceLine:
    """Validates the JSON value of a line.

    Raises:
      ValueError: it is not a request; the message says what was expected.
    """
    if not isinstance(value, dict):
        raise ValueError('expected an object with "timestamp", "input_length", "output_length" and "hash_ids"')
    time_ms, ids = value.get("timestamp"), value.get("hash_ids")
    if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms <= _MAX_FLOAT:  # or NaN
        raise wrong(value, "timestamp", f"a number of milliseconds, from 0 to {_MAX_FLOAT:.1e}")
    if not isinstance(ids, list) or not all(type(i) is str or (type(i) is int and i >= 0) for i in ids):
        raise wrong(value, "hash_ids", "a list of numbers of at least 0 or strings, one per block")
    return TraceLine(time_ms / 1e3, _length(value, "input_length"), _length(value, "output_length"), ids)


def wrong(line: Mapping[str, Any], name: str, expected: str) -> ValueError:
    """The error for an invalid field."""
    got = reprlib.repr(line[name]) if name in line else "missing"  # limited in length
    return ValueError(f'"{name}" is {got}; expected {expected}')


def _length(line: Mapping[str, Any], name: str) -> int | None:
    length = line.get(name)
    if length is not None and (type(length) is not int or not 0 <= length <= MAX_LENGTH):
        raise wrong(line, name, f"a number of tokens, from 0 to {MAX_LENGTH}")
    return length
