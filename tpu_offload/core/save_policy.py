"""Save policy: when a request's KV is saved, how far into the request, and which chunks.

KV can be saved at three times. When it is computed, which is early and mostly wasted, because HBM still has what is
reused soon. When HBM is about to evict its blocks: late, and only what HBM cannot keep, so that the host tier holds
other chunks than HBM and even a small one is of use. When the request is preempted: it is certain to return. A setting
selects the times (`SaveEvent`); each saves what the others have left.

A policy can also require that a chunk has been seen several times, because most are never seen again: a chunk is saved
when its n-th request contains it, within a window of some ten times the host tier's chunks.
"""

import abc
from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.config import OffloadConfig, SaveEvent
from tpu_offload.core.policies import Use
from tpu_offload.core.sketch import MAX_COUNT, Sketch
from tpu_offload.native import Given, mypyc_attr
from tpu_offload.types import ChunkKey

__all__ = ["SaveBySightings", "SaveEvent", "SavePolicy", "make_save_policy"]


@mypyc_attr(allow_interpreted_subclasses=True)
class SavePolicy(abc.ABC):
    """Decides which KV of a request is saved to the host tier.

    Called from the scheduler's thread, in this order for a request: `observe` once for each chunk, `num_tokens_to_save`
    when the engine names the request, `num_chunks_worth_saving` after that. It does not decide by what the host tier
    contains or has room for.
    """

    def resize(self, num_chunks: int) -> Given[None]:  # noqa: B027 (optional)
        """The host tier's capacity, in chunks, has changed."""

    @abc.abstractmethod
    def saves_on(self, event: SaveEvent) -> Given[bool]:
        """Whether anything is saved at that time; constant."""

    @abc.abstractmethod
    def num_tokens_to_save(self, *, num_prompt_tokens: int, num_computed_tokens: int) -> Given[int]:
        """Leading tokens that may be saved; at most `num_computed_tokens`."""

    @abc.abstractmethod
    def observe(self, use: Use, keys: Sequence[ChunkKey], first: int = 0) -> Given[None]:
        """Records that a request contains these chunks. A request that returns after a preemption counts once.

        Chunks that the request finds in HBM count too.

        Args:
          use: the request's.
          keys: chunks of its prefix, head first.
          first: the chunks before this one were recorded before, with the same `use`.
        """

    @abc.abstractmethod
    def num_chunks_worth_saving(self, keys: Sequence[ChunkKey], first: int, end: int) -> Given[int]:
        """How many of the chunks `first` to `end - 1` of a prefix are worth saving, from `first` on.

        A prefix has no holes: chunks after one that is not saved are of no use.
        """


@final
class SaveBySightings(SavePolicy):
    """Saves chunks that have been seen often enough.

    Args:
      events: when to save.
      generated: whether generated tokens are saved too. Otherwise they are saved when a later prompt contains them.
      num_sightings: 1 saves all; at most 15.
    """

    def __init__(
        self,
        *,
        events: Collection[SaveEvent] = (SaveEvent.COMPUTE,),
        generated: bool = False,
        num_sightings: int = 1,
    ) -> None:
        assert 1 <= num_sightings <= MAX_COUNT, "a sketch counts to 15"
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
    """The save policy of the settings."""
    return SaveBySightings(
        events=config.save_on, generated=config.decode_save, num_sightings=config.save_after_sightings
    )
