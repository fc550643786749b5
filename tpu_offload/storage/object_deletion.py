"""Deletes objects of an `object` tier, in batches where the store has them."""

import itertools
import threading
from collections.abc import Sequence

import obstore
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, S3Store

from tpu_offload.storage.object_errors import reason
from tpu_offload.storage.object_store import Store

BATCH = 1000


def delete_objects(store: Store, names: Sequence[str], stop: threading.Event | None = None) -> None:
    """Deletes objects; those that are missing are ignored.

    Args:
      store: that has them.
      names: of the objects.
      stop: once it is set no further call of the store begins.
    Raises:
      OSError: some of them may still be stored.
    """
    stop = stop or threading.Event()
    for batch in itertools.batched(names, BATCH):
        if stop.is_set():
            return
        try:
            if not isinstance(store, (S3Store, MemoryStore)):
                raise FileNotFoundError  # some may be missing, and a batch ends at the first of them
            obstore.delete(store, batch)
        except FileNotFoundError:
            _delete_one_by_one(store, batch, stop)
        except (BaseError, OSError) as e:
            raise OSError(reason(e)) from e


def _delete_one_by_one(store: Store, names: Sequence[str], stop: threading.Event) -> None:
    for name in names:
        if stop.is_set():
            return
        try:
            obstore.delete(store, name)
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as e:
            raise OSError(reason(e)) from e
