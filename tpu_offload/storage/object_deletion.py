"""Deletes objects of an `object` tier, in batches where the store has them."""

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import final

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore, S3Store

from tpu_offload.storage.object_errors import is_outage, reason
from tpu_offload.storage.object_store import Store

BATCH = 1000


@final
class LeftObjectsError(OSError):
    """Some objects could not be deleted.

    Args:
      why: what went wrong first.
      names: of those that may still be stored.
      is_outage: the error concerns others as well, which were not tried.
    """

    def __init__(self, why: str, names: Sequence[str], *, is_outage: bool) -> None:
        super().__init__(why)
        self.names = tuple(names)
        self.is_outage = is_outage


def delete_objects(store: Store, names: Sequence[str], stop: threading.Event | None = None) -> None:
    """Deletes objects; those that are missing are ignored.

    All are tried, until an error concerns more than its object: a store that is down is not asked again.

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
    concerns_all = False
    # Other stores have no batches: obstore would send a request for each object, and end at the first that is missing.
    calls = deque(itertools.batched(names, BATCH if isinstance(store, (S3Store, MemoryStore)) else 1))
    while calls and not stop.is_set():
        batch = calls.popleft()
        try:
            obstore.delete(store, batch if len(batch) > 1 else batch[0])
        except (BaseError, OSError) as e:
            concerns_all = _concerns_all(e, batch)
            if len(batch) > 1 and not concerns_all:  # the error names one object, and there may be others
                calls.extendleft((name,) for name in reversed(batch))
                continue
            if isinstance(e, FileNotFoundError):
                continue
            first_error = first_error or e
            left += batch
            if concerns_all:
                left += itertools.chain.from_iterable(calls)
                break
    if first_error is not None:
        raise LeftObjectsError(reason(first_error), left, is_outage=concerns_all) from first_error


def _concerns_all(error: BaseException, batch: Sequence[str]) -> bool:
    """Whether those of other objects would fail, too. One alone may be denied because its object is under a hold."""
    if isinstance(error, PermissionDeniedError):
        return len(batch) > 1
    return is_outage(error) or isinstance(error, UnauthenticatedError)
