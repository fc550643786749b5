"""The records of one storage tier as the scheduler knows them: stored, and being written, read or deleted.

A record is a chunk of full attention, a chunk of a window, or a part of a state (`piece_keys`). All are of one length,
and the size of a tier and its bound on what is in flight count records.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import final

from tpu_offload.config import StorageTierConfig, StorageWriteEvent
from tpu_offload.core.context import TierContext
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.eviction_order import EvictionOrder, Names, RecencyOrder, WrittenChunk, run_end
from tpu_offload.core.storage.order_choice import make_order
from tpu_offload.piece_keys import PieceKey, part_keys
from tpu_offload.types import ChunkKey

Keys = OrderedDict[ChunkKey, None]

_logger = logging.getLogger(__name__)


@final
class StoredRecords:
    """The records of one tier.

    Args:
      context: the scheduler's shared state.
      capacity: most records in the tier, those that are being written or deleted included.
      max_in_flight: most records on their way to and from it.
      tier: the settings of the tier.
      num_above: the most chunks in the host tier and the nearer tiers.

    Attributes:
      writing: those that jobs in flight write.
      promoting: those that jobs in flight read.
      to_delete: those to be deleted, by later jobs.
      num_deleting: those that jobs in flight delete.
      undeletable: those that the tier has refused to delete; they take room.
      resting: those whose last read has failed, perhaps not by their fault, and when they are stored again; the soonest
        first.
      host_evicted: chunks that the host tier has evicted since the last plan, if the order compares; tails first, each
        with the one before it.
      is_shared: other engines use the tier too, so nothing is deleted.
    """

    def __init__(
        self, context: TierContext, tier: StorageTierConfig, *, capacity: int, max_in_flight: int, num_above: int
    ) -> None:
        self._keys = context.keys
        self._num_windows = len(context.window_chunks)
        self._has_states = context.has_states
        self._groups = context.checkpoint_groups
        self._has_pieces = bool(self._groups)
        self._index = context.index
        # By pool: bytes of what is in a slot, and the records that hold it; 0 for one record under its own key.
        self._slot_nbytes = [context.blocks_per_chunk * context.layout.block_nbytes]
        self._num_parts = [0]
        state_group = context.layout.state_group
        if context.has_states and state_group is not None:
            self._slot_nbytes.append(state_group.block_nbytes)
            self._num_parts.append(context.config.records_per_state(context.layout))
        self.capacity = capacity
        self.max_in_flight = max_in_flight
        self._label = f"storage tier {tier.label}"
        self._order: EvictionOrder = RecencyOrder()
        if not self._has_pieces:
            demotes = tier.write_on is StorageWriteEvent.HOST_EVICTION
            self._order = make_order(
                tier.eviction_policy,
                capacity=capacity,
                num_above=num_above,
                demotes=demotes,
                label=self._label,
            )
        self.writing: set[ChunkKey] = set()
        self.promoting: set[ChunkKey] = set()
        self.to_delete: Keys = OrderedDict()
        self.num_deleting = 0
        self.undeletable: dict[ChunkKey, None] = {}
        self.resting: dict[ChunkKey, float] = {}
        self.is_shared = False
        self.host_evicted: dict[ChunkKey, ChunkKey] = {}
        self._ends: dict[ChunkKey, ChunkKey] = {}  # by chunk, the stored record that only a checkpoint after it needs

    # Names.

    def of_slot(self, key: ChunkKey, slot: int) -> Sequence[ChunkKey]:
        """The records of what is in a slot."""
        num_parts = self._num_parts[self._index.pool_of(slot)]
        return part_keys(PieceKey(key), num_parts) if num_parts else (key,)

    def of_slots(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> Sequence[ChunkKey]:
        """The records of what is in these slots."""
        if not self._has_states:
            return keys
        return [name for key, slot in zip(keys, slots, strict=True) for name in self.of_slot(key, slot)]

    def of_piece(self, piece: PieceKey, group: int) -> Sequence[ChunkKey]:
        """The records of a piece of a checkpoint."""
        return self._groups[group].record_names(piece)

    def takes_chunk(self, group: int) -> bool:
        """Whether pieces of this group take slots of chunks."""
        return self._groups[group].first_slot == 0

    def nbytes(self, slots: Sequence[int]) -> int:
        """Bytes of what is in these slots, over all devices."""
        return sum([self._index.count_in(pool, slots) * nbytes for pool, nbytes in enumerate(self._slot_nbytes)])

    def num_records(self, slot: int) -> int:
        """How many records the contents of a slot have."""
        return self._num_parts[self._index.pool_of(slot)] or 1

    def belongs(self, name: ChunkKey) -> bool:
        """Whether it is a record of this model, of after the last reset."""
        namespace = self._keys.namespace
        return name.endswith(namespace) or (
            self._has_pieces and (name[:-1].endswith(namespace) or name[:-3].endswith(namespace))
        )

    def may_end_at(self) -> dict[ChunkKey, ChunkKey]:
        """The chunks after which there may be a checkpoint in the tier. Not to be changed."""
        return self._ends

    def _end_of(self, name: ChunkKey) -> ChunkKey | None:
        """The chunk that a checkpoint follows if this record is its last piece; else None."""
        namespace = self._keys.namespace
        if name.endswith(namespace):
            return None
        if self._has_states:
            is_first_part = name[:-3].endswith(namespace) and not any(name[-2:])
            return ChunkKey(name[:-3]) if is_first_part else None
        return ChunkKey(name[:-1]) if name[-1] == self._num_windows - 1 else None

    # What is stored.

    @property
    def stored(self) -> Names:
        """All stored records, as they are at any time."""
        return self._order.stored

    def share(self) -> None:
        """Other engines use the tier, too."""
        if not self.is_shared:
            self.is_shared, before = True, self._order
            _logger.info("%s is shared with other engines: what is known of it is evicted by lru", self._label)
            self._order = RecencyOrder()
            for name in before.stored:
                self._order.add(name)

    def knows(self, name: ChunkKey) -> bool:
        """Whether it is stored, if only again soon, or being written."""
        return name in self._order.stored or name in self.writing or name in self.resting

    def has(self, names: Sequence[ChunkKey]) -> bool:
        """Whether all of these are stored."""
        stored = self._order.stored
        return all(map(stored.__contains__, names))

    def holds(self, name: ChunkKey) -> bool:
        """Whether a chunk is stored, or will be, so that the host tier loses less by evicting it; see the order."""
        return self._order.holds(name) or name in self.writing

    def are_read(self, names: Iterable[ChunkKey]) -> bool:
        """Whether a job in flight reads any of these."""
        return not self.promoting.isdisjoint(names)

    def add(self, name: ChunkKey) -> None:
        """A record is stored; it counts as used last."""
        self._order.add(name)
        if self._has_pieces and (end := self._end_of(name)) is not None:
            self._ends[end] = name

    def add_written(self, chunks: Sequence[WrittenChunk]) -> None:
        """Chunks of full attention are stored, of each prefix the head first."""
        self._order.add_written(chunks)

    @property
    def expects(self) -> bool:
        """Whether `expect` is of use."""
        return self._order.expects

    def expect(self, chunks: Sequence[WrittenChunk]) -> None:
        """Chunks are in the host tier, and are written when it evicts them; of each prefix the head first."""
        self._order.expect(chunks)

    def drop_expected(self, name: ChunkKey) -> None:
        """What the host tier has evicted is not written."""
        self._order.drop_expected(name)

    def remove(self, name: ChunkKey) -> None:
        """A record is not stored any more, or never was."""
        if name in self._order.stored:
            self._order.remove(name)
            self._removed(name)

    def _removed(self, name: ChunkKey) -> None:
        if self._has_pieces and (end := self._end_of(name)) is not None:
            self._ends.pop(end, None)

    def forget(self, name: ChunkKey) -> None:
        """As `remove`; every worker has to delete its shard, unless others may read it."""
        self.remove(name)
        if not self.is_shared:
            self.to_delete[name] = None

    def rest(self, name: ChunkKey, until_s: float) -> None:
        """A record could not be read: it is not stored until then, but takes room."""
        self.remove(name)
        if not self.is_shared:
            self.resting[name] = until_s

    def end_rest(self, now_s: float) -> None:
        """Records that have rested until now are stored again. Amortized O(1)."""
        while self.resting:
            name, until_s = next(iter(self.resting.items()))
            if until_s > now_s:
                break
            del self.resting[name]
            self.add(name)

    @property
    def compares(self) -> bool:
        """Whether `begin` has to be told what is found above."""
        return self._order.compares

    def begin(self, use: Use, keys: Sequence[ChunkKey], num_above: int) -> None:
        """A request uses this prefix, before anything of it is read or written; see the order. O(keys)."""
        self._order.begin(use, keys, num_above)

    def note_host_evicted(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """The host tier has evicted a chunk that is stored, or written then; tails first."""
        if self._order.compares and parent is not None:
            self.host_evicted[key] = parent

    def begin_demotion(self, newest: Use, most: int) -> None:
        """What the host tier has evicted since the last call is written now, at most so many chunks.

        Args:
          newest: the use of the last request.
          most: see `EvictionOrder.host_evicted`; less if fewer may be in flight.
        """
        if self.host_evicted:
            evicted, self.host_evicted = self.host_evicted, {}
            use = newest.replace(is_request=False, priority=0)  # for those that were not expected
            chunks = [(use, key, parent) for key, parent in reversed(evicted.items())]
            self._order.host_evicted(chunks, min(most, self.max_in_flight - self.max_read))

    def find(self, keys: Sequence[ChunkKey], first: int) -> int:
        """Where the stored chunks end that begin with `first`."""
        return run_end(self._order.stored, keys, first)

    def use(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request uses the chunks of this prefix that are stored. O(keys)."""
        self._order.use(use, keys)

    def touch(self, names: Iterable[ChunkKey]) -> None:
        """Stored ones of these were read, the last one last."""
        self._order.touch(names)

    def evict(self, num_records: int) -> int:
        """Forgets so many records, fewer if those being read are in the way, or none if negative; returns how many."""
        if num_records <= 0 or not self._order.stored:
            return 0
        evicted = self._order.evict(num_records, self.promoting)
        for name in evicted:
            self._removed(name)
        if not self.is_shared:
            self.to_delete.update(dict.fromkeys(evicted))
        return len(evicted)

    def clear(self) -> None:
        """Nothing is stored, and nothing has to be deleted."""
        self._order.clear()
        self.host_evicted = {}
        self.to_delete.clear()
        self.undeletable.clear()
        self.resting.clear()
        self._ends.clear()

    def tidy(self, is_coming: Callable[[ChunkKey], bool]) -> None:
        """Goes on with what `clear` and losses of host memory have left; called in every step.

        Args:
          is_coming: see `EvictionOrder.tidy`.
        """
        self._order.tidy(is_coming)

    @property
    def max_per_slot(self) -> int:
        """The most records that the contents of a slot have."""
        return max(1, *self._num_parts)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight or to be deleted."""
        return not (self.writing or self.promoting or self.to_delete or self.num_deleting)

    @property
    def room(self) -> int:
        """Free capacity; negative while what is to be deleted is more than one worker has."""
        num_unwanted = len(self.to_delete) + self.num_deleting + len(self.undeletable)
        return self.capacity - len(self._order.stored) - len(self.resting) - len(self.writing) - num_unwanted

    @property
    def room_in_flight(self) -> int:
        """How many more may be in flight, in either direction."""
        return self.max_in_flight - len(self.writing) - len(self.promoting)

    @property
    def max_read(self) -> int:
        """The most that may be read at a time, beside what is written: at least half of what may be in flight."""
        return self.max_in_flight - self.max_in_flight // 2

    @property
    def room_to_write(self) -> int:
        """How many more may be written."""
        return min(self.max_in_flight - self.max_read - len(self.writing), self.room_in_flight, self.room)

    def check_invariants(self) -> None:
        """Raises AssertionError unless the sets agree. For tests."""
        self._order.check_invariants()
        num_wanted = len(self.stored) + len(self.resting) + len(self.writing)
        assert num_wanted <= self.capacity, "storage holds more than it may"
        stored = set(self.stored)
        assert not self.writing & stored
        assert not (self.writing | stored) & self.to_delete.keys(), "what is stored would be deleted"
        wanted = self.writing | stored
        assert self.resting.keys().isdisjoint(wanted | self.to_delete.keys()), "a record counts twice"
        assert self.undeletable.keys().isdisjoint(wanted | self.to_delete.keys() | self.resting.keys()), "likewise"
        assert all(name in stored and self._end_of(name) == end for end, name in self._ends.items())
        assert len(self._ends) == sum(self._has_pieces and self._end_of(name) is not None for name in self.stored)
