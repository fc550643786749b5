"""Names a generation on the server of a `valkey` tier, also on one that is full and evicts nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from glide_sync import GlideClient, GlideClusterClient, GlideError

_FULL = "OOM"  # the code of its refusal
_FREED_S = 2.0  # within which a server frees what was deleted, which it does in the background
_PAUSE_S = 0.02


def name_generation(
    client: GlideClient | GlideClusterClient,
    marker: bytes,
    generation: str,
    old: Iterator[Sequence[bytes]],
    on_deleted: Callable[[int], None],
) -> None:
    """Writes a generation. While a full server refuses it, records are deleted.

    Args:
      client: of the server.
      marker: the name of the generation.
      generation: the value.
      old: batches of names that are not needed once it is written; taken as far as necessary.
      on_deleted: told how many more were deleted.
    Raises:
      GlideError: the server refuses it all the same, or does not answer.
    """
    last_s: float | None = None
    while True:
        try:
            client.set(marker, generation)
            return
        except GlideError as e:
            if _FULL not in str(e):
                raise
            batch: list[Any] = list(next((names for names in old if names), ()))
            if batch:
                client.unlink(batch)
                on_deleted(len(batch))
                last_s = time.monotonic()
            elif last_s is None or time.monotonic() > last_s + _FREED_S:
                raise
            else:
                time.sleep(_PAUSE_S)
