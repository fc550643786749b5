"""Reads block tables and block hashes, in any form that an engine has them, into plain ints and bytes.

An engine passes what it has: a list that it appends to, a row of a numpy array that it overwrites with another
request's blocks in the next step, an array on a device, a deque, a memory view. Only its contents during the call
count. No reference to it is kept, and all of it is read before the call changes anything: unreadable input is rejected
as a whole.

A table is read in every step in which its request completes a block, and it may be long. So only new ids are validated
one by one, and the others are compared with the request's previous ones, which takes 4 ns a block. Arrays stay arrays:
copying one is cheaper than comparing it.
"""

import array
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash
from tpu_offload.values import as_count, error_text, one_line

Ids = list[int] | npt.NDArray[np.int64]
"""Block ids, not negative, in a container that the engine has no reference to."""

_MAX = 2**63 - 1
_RAW = "bBc"  # formats of memory views of single bytes: raw memory, not numbers


def read_ids(request_id: str, given: Any, first: int = 0, end: int | None = None) -> list[int]:
    """The block ids `first` to `end - 1` of a table, by default all; the others are not read.

    Raises:
      RequestError: the table is not a sequence of block ids, or is shorter than its length says.
    """
    if type(given) is list:  # nearly always
        ids = given[first:end]
        if len(ids) == (len(given) if end is None else end) - first:
            return _plain_ids(request_id, ids)
    return plain(_read(request_id, given, first, end))


def read_changes(request_id: str, known: Ids, given: Any, end: int) -> tuple[int, Ids]:
    """The first `end` block ids of a table, as changes to those read before.

    Args:
      request_id: the request of the table.
      known: its first block ids, as read before.
      given: its table, of at least `end` ids.
      end: how many to read.
    Returns:
      How many of `known`, from the first on, are unchanged; and the ids after those, in a new list or array.
    Raises:
      RequestError: the table is not a sequence of block ids.
    """
    if type(given) is tuple:
        given = list(given[:end])
    if type(given) is not list or type(known) is not list:
        return 0, _read(request_id, given, 0, end)
    num_same = len(known)
    if num_same > end:
        known, num_same = known[:end], end
    try:
        if given[:num_same] != known:
            num_same = 0
    except Exception as e:  # an element cannot be compared
        raise _unreadable(request_id, "block ids", e) from e
    return num_same, _plain_ids(request_id, given[num_same:end]) if num_same < end else []


def read_hashes(request_id: str, given: Any, first: int = 0, end: int | None = None, step: int = 1) -> list[BlockHash]:
    """Every `step`-th hash of a sequence of block hashes, from `first` on.

    Raises:
      RequestError: it is not a sequence, or one of these hashes is not bytes.
    """
    if type(given) is list:
        hashes = given[first:end:step]
    else:
        check_sequence(request_id, given, "block hashes")
        # numpy's own bytes lose trailing zeros, so only an array of objects can hold hashes.
        if isinstance(given, np.ndarray) and given.dtype != object:
            raise RequestError(
                f"the block hashes of request {request_id} are an array of {given.dtype}; expected a sequence of bytes"
            )
        try:
            sliced = type(given) is tuple or isinstance(given, np.ndarray)
            hashes = list(given[first:end:step] if sliced else itertools.islice(given, first, end, step))
        except Exception as e:
            raise _unreadable(request_id, "block hashes", e) from e
    if len(hashes) == 1 and type(hashes[0]) is bytes:  # a request in decode
        return hashes
    for block_hash in hashes:  # compiled, this takes half as long as a set of the types
        if type(block_hash) is not bytes:
            kind = type(block_hash).__name__
            raise RequestError(f"request {request_id} has a block hash of type {kind}; expected bytes")
    return hashes


def read_tokens(request_id: str, given: Any, what: str) -> list[int]:
    """Numbers of tokens, each a block boundary or not.

    Raises:
      RequestError: they are not a sequence of counts.
    """
    check_sequence(request_id, given, what)
    try:
        counts = [as_count(item) for item in given]
    except Exception as e:
        raise _unreadable(request_id, what, e) from e
    found = [count for count in counts if count is not None]
    if len(found) < len(counts):
        raise RequestError(f"the {what} of request {request_id} are {one_line(given)}; expected integers from 0 on")
    return found


def read_tables(request_id: str, given: Any, *, num_groups: int | None = None) -> list[Any]:
    """The block tables of a request, one a layer group; does not read their ids.

    Raises:
      RequestError: they are not a sequence of sequences, or not `num_groups` of them.
    """
    check_sequence(request_id, given, "block tables")
    try:
        tables = list(given)
    except Exception as e:
        raise _unreadable(request_id, "block tables", e) from e
    if num_groups is not None and len(tables) != num_groups:
        raise RequestError(
            f"request {request_id} has {len(tables)} block tables; expected {num_groups}, one a layer group, each a "
            "sequence of block ids"
        )
    for table in tables:
        check_sequence(request_id, table, "block ids")
    return tables


def check_sequence(request_id: str, items: Any, what: str) -> None:
    """Raises RequestError unless this is a sequence. Its elements are not looked at."""
    kind = type(items)
    if kind is list or kind is tuple:
        return
    try:
        sound = hasattr(items, "__getitem__") and len(items) >= 0
    except Exception as e:  # a zero-dimensional array, for instance
        raise _unreadable(request_id, what, e) from e
    if not sound or isinstance(items, (str, bytes, bytearray, dict)):
        raise RequestError(f"the {what} of request {request_id} are a {kind.__name__}; expected a sequence")


def plain(ids: Ids) -> list[int]:
    """The ids as Python ints, which is what jobs hold."""
    return ids if isinstance(ids, list) else ids.tolist()


def _read(request_id: str, given: Any, first: int, end: int | None) -> Ids:
    """The ids as a new list or array."""
    check_sequence(request_id, given, "block ids")
    try:
        num_wanted = (len(given) if end is None else end) - first
        items = _items(given, first, end)
    except Exception as e:
        raise _unreadable(request_id, "block ids", e) from e
    if type(items) is list:
        ids: Ids = _plain_ids(request_id, items)
    else:
        if items.ndim != 1 or items.dtype.kind not in "iu":
            raise RequestError(
                f"the block ids of request {request_id} are an array of {items.dtype}{list(items.shape)}; expected "
                "integers in one dimension"
            )
        ids = np.array(items, np.int64)
        if len(ids) and ids.min() < 0:
            raise _bad_ids(request_id, int(items[int(ids.argmin())]))
    if len(ids) != num_wanted:
        raise RequestError(f"request {request_id} has {len(ids)} block ids; expected {num_wanted}")
    return ids


def _items(given: Any, first: int, end: int | None) -> Any:
    """A slice of what was given: a new list of anything, or an array that may be a view of the engine's."""
    kind = type(given)
    if kind is list:
        return given[first:end]
    if kind is tuple:
        return list(given[first:end])
    if isinstance(given, memoryview) and given.format in _RAW:
        raise TypeError(f"a memory view of bytes (format {given.format}); cast it to integers")
    if isinstance(given, (memoryview, array.array)) or hasattr(given, "__array__"):
        items = np.asarray(given)[first:end]
        return items.tolist() if items.dtype == object and items.ndim == 1 else items
    return list(itertools.islice(given, first, end))


def _plain_ids(request_id: str, items: list[Any]) -> list[int]:
    if not items:
        return items
    if len(items) == 1 and type(items[0]) is int and 0 <= items[0] <= _MAX:  # a request in decode
        return items
    for item in items:
        if type(item) is not int:
            break
    else:
        try:
            array.array("I", items)  # takes numbers from 0 to 2**32 - 1, in a third of the time of `min` and `max`
        except OverflowError:
            pass
        else:
            return items
    ids = []
    for item in items:
        block_id = as_count(item)
        if block_id is None:
            raise _bad_ids(request_id, item)
        ids.append(block_id)
    return ids


def _bad_ids(request_id: str, item: Any) -> RequestError:
    return RequestError(
        f"request {request_id} has the block id {one_line(item)}; expected a sequence of integers from 0 on"
    )


def _unreadable(request_id: str, what: str, error: Exception) -> RequestError:
    return RequestError(f"the {what} of request {request_id} cannot be read: {error_text(error)}")
