"""Reads files with one JSON value per line: traces, conversations."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpu_offload.errors import InputError

# Magic bytes of compressed files; no JSON starts with any of them.
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}


MAX_LINE_NBYTES = 2**28
"""A longer line is rejected before parsing: parsed JSON takes up to twenty times the memory."""


def parse_lines[T](path: Path, parse: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """Yields line numbers (from 1) and parsed values; blank lines are skipped.

    Raises:
      InputError: the file cannot be read or is compressed, or `parse` rejects a line with a ValueError.
    """
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_NBYTES + 1)
                if not line:
                    return
                if number == 1:
                    _check_unpacked(path, line)
                if len(line) > MAX_LINE_NBYTES:
                    raise InputError(
                        f"{path} line {number}: longer than {MAX_LINE_NBYTES} bytes; expected one request per line"
                    )
                if not line.strip():
                    continue
                try:
                    yield number, parse(json.loads(line.rstrip(b"\r\n")))
                except (ValueError, RecursionError) as e:  # bad JSON and bad UTF-8 are ValueErrors
                    raise InputError(f"{path} line {number}: {_reason(e)}; got {_excerpt(line)}") from None
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}") from e


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, RecursionError):
        return "too many arrays or objects in one another"
    if "integer string conversion" in str(error):  # its advice is a function of Python
        return f"a number of more than {sys.get_int_max_str_digits()} digits"
    return str(error)


def _check_unpacked(path: Path, head: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is compressed ({name}); expected JSON lines: unpack it first")


def _excerpt(line: bytes) -> str:
    text = line.strip().decode(errors="replace")
    return repr(text if len(text) <= 60 else text[:57] + "...")
