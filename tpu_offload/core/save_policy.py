"""What is worth saving: when, how far into a request, and which chunks of it.

A request's KV can be saved at three times. When it is computed: early, and most of it for nothing, since HBM still has
what comes back soon. When HBM is about to give its blocks to others: late, and only what HBM cannot keep, so that the
host tier holds other chunks than HBM and even a small one is of use. When the request is preempted: it is certain to
come back. Which of them are used is a setting (`SaveEvent`); each takes what the others have left.

Beside that a chunk can be asked to have been seen a few times, as most are never seen again: saved are those that a
request comes by with for the n-th time, within some ten times the host tier's chunks.
"""

import abc
from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.config import OffloadConfig, SaveEvent
from tpu_offload.core.policies import Use
from tpu_offload.core.sketch import MAX_COUNT, Sketch
from tpu_offload.types import ChunkKey

__all__ = ["SaveBySightings", "SaveEvent", "SavePolicy", "make_save_policy"]


class SavePolicy(abc.ABC):
    """Decides what of a request's KV goes to the host tier.

    Called from the scheduler's thread, in this order for a request: `see` once for each chunk, `num_tokens_to_save`
    when the engine says how far it is, `num_chunks_worth_saving` when that is looked at. It decides only: whether there
    is room, and what is there already, it does not ask.
    """

    def resize(self, num_chunks: int) -> None:  # noqa: B027 (most do not ask)
        """The host tier has room for this many chunks from now on."""

    @abc.abstractmethod
    def saves_on(self, event: SaveEvent) -> bool:
        """Whether anything is saved at that time. Always the same answer."""

    @abc.abstractmethod
    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        """Leading tokens that may be saved; at most `num_computed_tokens`."""

    @abc.abstractmethod
    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int = 0) -> None:
        """A request comes by whose prefix these are. One that was preempted and comes back does not count again.

        It does not matter where its KV is: what a request finds in HBM it has seen as well.

        Args:
          use: the request's.
          keys: chunks of its prefix, head first.
          first: those before this one it has been told of, with the same `use`.
        """

    @abc.abstractmethod
    def num_chunks_worth_saving(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """How many of the chunks `first` to `end - 1` of a prefix are worth saving, from `first` on.

        A prefix has no holes: what follows a chunk that is not worth it is of no use.
        """


@final
class SaveBySightings(SavePolicy):
    """Saves chunks that have been seen often enough.

    Args:
      events: when to save.
      generated: whether generated tokens are saved too. Else they are when a later prompt contains them.
      num_sightings: 1 saves all; at most 15.
    """

    def __init__(
        self,
        *,
        events: Collection[SaveEvent] = (SaveEvent.COMPUTE,),
        generated: bool = False,
        num_sightings: int = 1,
    ) -> None:
        assert 1 <= num_sightings <= MAX_COUNT, "more than a sketch can count"
        self._events = frozenset(events)
        self._generated = generated
        self._num_sightings = num_sightings
        self._sketch = Sketch() if num_sightings > 1 else None

    def resize(self, num_chunks: int) -> None:
        """See the base class. The sketch never shrinks."""
        if self._sketch is not None:
            self._sketch.grow(num_chunks)

    def saves_on(self, event: SaveEvent) -> bool:
        """See the base class."""
        return event in self._events

    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        """See the base class."""
        if self._generated:
            return num_computed_tokens
        return min(num_prompt_tokens, num_computed_tokens)

    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int = 0) -> None:
        """See the base class."""
        if self._sketch is not None:
            self._sketch.add(keys[first:])

    def num_chunks_worth_saving(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """See the base class."""
        if self._sketch is None:
            return end - first
        count = self._sketch.count
        return next((i for i in range(first, end) if count(keys[i]) < self._num_sightings), end) - first


def make_save_policy(config: OffloadConfig) -> SavePolicy:
    """What the settings say."""
    return SaveBySightings(
        events=config.save_on, generated=config.decode_save, num_sightings=config.save_after_sightings
    )
