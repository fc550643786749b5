"""Deletes objects of an `object` tier, in batches where the store has them."""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import final

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import MemoryStore, S3Store

from tpu_offload.storage.object_errors import concerns_all, reason
from tpu_offload.storage.object_store import Store

BATCH = 1000


@final
class LeftObjectsError(OSError):
    """Some objects could not be deleted.

    Args:
      why: what went wrong first.
      names: of those that may still be stored.
      is_outage: the error applies to every object: the others were not tried.
    """

    def __init__(self, why: str, names: Sequence[str], *, is_outage: bool) -> None:
        super().__init__(why)
        self.names = tuple(names)
        self.is_outage = is_outage


def write_and_delete(store: Store, name: str) -> None:
    """Writes an object and deletes it.

    Raises:
      BaseError, OSError: one of them is refused, or the store does not answer.
    """
    obstore.put(store, name, b"probe", use_multipart=False)
    with contextlib.suppress(FileNotFoundError):  # somebody else has deleted it
        obstore.delete(store, name)


def delete_objects(store: Store, names: Sequence[str], stop: threading.Event | None = None) -> None:
    """Deletes objects; those that are missing are ignored.

    All are tried, until an error applies to every object: a store that is down is not asked again. A batch that is
    forbidden as a whole is not tried one by one.

    Args:
      store: that has them.
      names: of the objects.
      stop: once it is set no further call of the store begins.
    Raises:
      LeftObjectsError: some of them may still be stored.
    """
    stop = stop or threading.Event()
    left: list[str] = []
    first_error: BaseException | None = None
    is_outage = False
    # Other stores have no batches: obstore would send a request for each object, and end at the first that is missing.
    calls = deque(itertools.batched(names, BATCH if isinstance(store, (S3Store, MemoryStore)) else 1))
    while calls and not stop.is_set():
        batch = calls.popleft()
        try:
            obstore.delete(store, batch if len(batch) > 1 else batch[0])
        except (BaseError, OSError) as e:
            is_outage = concerns_all(e)
            # Else the error of a batch names one object, and there may be others.
            if len(batch) > 1 and not is_outage and not isinstance(e, PermissionDeniedError):
                calls.extendleft((name,) for name in reversed(batch))
                continue
            if isinstance(e, FileNotFoundError) and not is_outage:
                continue
            first_error = first_error or e
            left += batch
            if is_outage:
                left += itertools.chain.from_iterable(calls)
                break
    if first_error is not None:
        raise LeftObjectsError(reason(first_error), left, is_outage=is_outage) from first_error
