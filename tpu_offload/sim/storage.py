"""A simulated storage tier: what it is given, evicts and gives back, step by step as `core.storage.planner` plans it.

Admission and the limits of a step are the library's own. No copy fails or takes longer than its step, and what may be
in flight is not limited. A tier has no prefix rule: it may hold the tail of a prefix whose head is in the host tier
only, and a lookup continues in it where the host tier ends.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from tpu_offload.config import StorageAdmission, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.core.index import NO_PARENT
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.admission import AdmissionFilter
from tpu_offload.core.storage.eviction_order import WrittenChunk
from tpu_offload.core.storage.order_choice import make_order
from tpu_offload.core.storage.writes import MAX_CASCADES, MAX_DEMOTIONS
from tpu_offload.types import ChunkKey


@dataclasses.dataclass(frozen=True, slots=True)
class StorageSetup:
    """One tier of a stack.

    Attributes:
      num_chunks: its capacity. Capacity beyond the blocks of the trace takes no memory.
      write_on: when chunks are written to it.
      admission: which chunks it takes.
      eviction: which it evicts.
    """

    num_chunks: int
    write_on: StorageWriteEvent = StorageWriteEvent.SAVE
    admission: StorageAdmission = StorageAdmission.ALL
    eviction: StorageEvictionPolicy = StorageEvictionPolicy.AUTO


@final
class StorageTier:
    """The chunks of one tier.

    Args:
      setup: its settings.
      num_blocks: prompt blocks of the trace.
      num_above: chunks that the host tier and the nearer tiers have room for.
      parents: for each chunk the one before it in its prefix, if there is one.

    Attributes:
      demotes: whether what the host tier evicts is written, instead of what is saved.
      num_written, num_evicted: chunks, so far.
      num_dropped: chunks that the host tier evicted and for which there was no room.
    """

    def __init__(
        self, setup: StorageSetup, *, num_blocks: int, num_above: int, parents: Mapping[ChunkKey, ChunkKey]
    ) -> None:
        # The sketch of admission is sized by the occurrences of blocks, not by unique ones.
        self._capacity = min(setup.num_chunks, num_blocks)
        self._admission = AdmissionFilter(setup.admission, self._capacity)
        self.demotes = setup.write_on is StorageWriteEvent.HOST_EVICTION
        self._order = make_order(
            setup.eviction,
            capacity=setup.num_chunks,
            num_above=num_above,
            demotes=self.demotes,
            label="the simulated tier",
        )
        self._parents = parents
        self._newest = Use(-1)
        self._candidates: OrderedDict[ChunkKey, Use] = OrderedDict()  # to write, and who saved them; oldest first
        self._reading: frozenset[ChunkKey] = frozenset()
        self.num_written = self.num_evicted = self.num_dropped = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._order.stored

    def holds(self, key: ChunkKey) -> bool:
        """Whether the host tier loses less by evicting a chunk, see `EvictionOrder`."""
        return self._order.holds(key)

    @property
    def has_plans(self) -> bool:
        """Whether `write` would write something."""
        return bool(self._candidates)

    # What may be written.

    def observe(self, use: Use, keys: Sequence[ChunkKey], num_in_host: int, num_above: int) -> None:
        """A request contains these chunks, of which the host tier has the first, nearer tiers possibly more."""
        self._newest = use
        self._order.begin(use, keys, num_above)
        self._admission.observe(keys)
        self._offer_admitted(use, keys[:num_in_host])

    def hit(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request loads the last of these chunks, a prefix, from the host tier."""
        self._admission.hit(keys)
        self._offer_admitted(use, keys)

    def _offer_admitted(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        if self._admission.depends_on_uses:
            self.offer(use, keys)

    def offer(self, use: Use, keys: Iterable[ChunkKey]) -> None:
        """Chunks are in the host tier; those that admission takes are written in the next steps, or when they leave."""
        admits, stored = self._admission.admits, self._order.stored
        if not self.demotes:
            self._candidates.update((key, use) for key in keys if key not in stored and admits(key))
        elif self._order.expects:
            self._order.expect(self._with_parents((use, key) for key in keys if admits(key)))

    # A step.

    def write(self, is_in_host: Callable[[ChunkKey], bool]) -> None:
        """Writes candidates, as many as one step does."""
        room = self._room
        self._evict(min(len(self._candidates), MAX_CASCADES) - room)  # which is room from the next step on
        batch: list[tuple[Use, ChunkKey]] = []
        while self._candidates and len(batch) < min(MAX_CASCADES, room):
            key, use = self._candidates.popitem(last=False)
            if is_in_host(key) and key not in self._order.stored:
                batch.append((use, key))
        self._add(batch)

    def demote(self, evicted: Sequence[ChunkKey]) -> None:
        """Writes what the host tier has evicted, in its order, tails first; what has no room is dropped.

        A demotion cannot wait for the end of a deletion, so some room is kept free.
        """
        taken: list[ChunkKey] = []
        for key in evicted:
            if key in self._order.stored or self._admission.admits(key):
                taken.append(key)
            else:
                self._order.drop_expected(key)
        use = self._newest.replace(is_request=False, priority=0)
        if self._order.compares:
            self._order.host_evicted(self._with_parents((use, key) for key in reversed(taken)), MAX_DEMOTIONS)
        victims = [key for key in taken if key not in self._order.stored]
        if not victims:
            return
        kept_free = min(MAX_DEMOTIONS, max(1, self._capacity // 4))
        victims.reverse()
        num_written = min(MAX_DEMOTIONS, self._room)
        batch = victims[:num_written]
        for key in reversed(victims[num_written:]):
            self.num_dropped += 1
            self._order.drop_expected(key)
        self._evict(kept_free - self._room)
        self._add([(use, key) for key in batch])
        self._evict(kept_free - self._room)

    def finish(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request with this prefix has ended, and all of it is written that will be."""
        self._order.use(use, keys)

    def read(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks are read in the coming step."""
        self._order.touch(reversed(keys))  # the head last, so that tails are evicted first
        self._reading = frozenset(keys)

    def end_step(self) -> None:
        """What was read has come."""
        self._reading = frozenset()

    def leading(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """The chunks up to the first one that it does not have."""
        return list(itertools.takewhile(self._order.stored.__contains__, keys))

    # Inside.

    @property
    def _room(self) -> int:
        return self._capacity - len(self._order.stored)

    def _add(self, batch: Sequence[tuple[Use, ChunkKey]]) -> None:
        self._order.add_written(self._with_parents(batch))
        self.num_written += len(batch)

    def _with_parents(self, chunks: Iterable[tuple[Use, ChunkKey]]) -> list[WrittenChunk]:
        return [(use, key, self._parents.get(key, NO_PARENT)) for use, key in chunks]

    def _evict(self, num_chunks: int) -> None:
        """Evicts so many chunks, fewer if the next one is being read."""
        if num_chunks > 0:
            self.num_evicted += len(self._order.evict(num_chunks, self._reading))
