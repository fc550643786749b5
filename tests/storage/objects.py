"""The store of an object tier, seen by another client: objects by the names that `storage/object.py` documents."""

import threading
from pathlib import Path

import obstore

from tpu_offload.storage.object import SWEEPER_NAME, ObjectTier
from tpu_offload.storage.object_names import MARKER, name_of
from tpu_offload.storage.object_store import Store, open_store

LATE_S = 30.0  # a generous end for what should take less than a second


def store_of(tier: ObjectTier) -> Store:
    """Another client of a tier's bucket or directory."""
    return open_store(tier.spec.options)[0]


def directory_of(tier: ObjectTier) -> Path | None:
    """The directory of a tier's objects; None for a bucket."""
    return open_store(tier.spec.options)[1]


def root_of(tier: ObjectTier) -> str:
    """What the names of all objects of a tier begin with."""
    return f"{tier.spec.fingerprint}/{tier.spec.worker_id}"


def marker_of(tier: ObjectTier) -> str:
    """The object that names the current generation."""
    return f"{root_of(tier)}/{MARKER}"


def generation_of(tier: ObjectTier, store: Store | None = None) -> str:
    """The generation that the store names; `store` is another way to it, as below a server that is dead."""
    return bytes(obstore.get(store or store_of(tier), marker_of(tier)).bytes()).decode()


def object_of(tier: ObjectTier, key: bytes, store: Store | None = None) -> str:
    """The object of a key in the current generation."""
    return f"{root_of(tier)}/{generation_of(tier, store)}/{name_of(key)}"


def names(tier: ObjectTier) -> list[str]:
    """All objects of the store."""
    return sorted(entry["path"] for entries in obstore.list(store_of(tier)) for entry in entries)


def wait_until_swept() -> None:
    """Waits for the deletion of earlier generations."""
    for thread in threading.enumerate():
        if thread.name == SWEEPER_NAME:
            thread.join(LATE_S)
            assert not thread.is_alive()
