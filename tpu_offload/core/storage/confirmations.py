"""Which records of a shared tier are asked for again: those that requests use though nothing reads them.

What an engine has in its host tier, it never reads from the server. So to the server its hottest chunks, such as a
common system prompt, look unused, and are evicted first; they may also expire, or go with a restart of the server or
with another engine's reset. This engine would count them as stored for ever and never write them again, and a new
engine would find the tails of all prompts and the head of none.

So what is known of a shared tier has to be *confirmed* now and then: a record is when it was written, read, or found by
a lookup. When a request uses a prefix whose records were last confirmed more than `_INTERVAL_S` ago, a lookup
of its own asks for them (`core.storage.lookups`), each by itself: a server evicts single records. The request does not
wait for that. What is found is confirmed, and counts as used on the server (see `StorageTier.find`). What is missing is
not stored any more, and if the host tier has it, it is offered for writing as if it had just been saved.

What bounds the cost: a prompt is looked through once, when its request is matched for the first time. Confirmed names
are in two sets, of this interval and of the one before, so a name is asked for at most once an interval. The sets are
bounded: an engine that uses more chunks than they hold within an interval asks more often. One lookup of `MAX_ASKED`
names is in flight at a time; asking for each by itself takes the worker's thread for lookups some milliseconds.

With windows or states, the records of the last checkpoint of the prefix that the host tier has are asked for as well: a
new engine can use the chunks up to a checkpoint only. If some of them are missing the whole checkpoint is offered.

Nothing is asked for after a reset, when no other engine has these keys, or without lookups.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from tpu_offload.core.context import TierContext
from tpu_offload.core.index import Checkpoint, ChunkState
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.types import ChunkKey

MAX_ASKED = 256  # names in a lookup
_INTERVAL_S = 60.0
_MAX_WANTED = 4096
_MAX_CONFIRMED = 65536  # names in a set


@final
class Confirmations:
    """What is confirmed of one shared tier; does nothing until `enable`.

    Args:
      context: the scheduler's shared state.
      records: the tier's.
      offer: called with chunks to be written again, and the uses for which they were asked for.
      offer_checkpoint: called with checkpoints to be written again.
    """

    def __init__(
        self,
        context: TierContext,
        records: StoredRecords,
        *,
        offer: Callable[[Mapping[ChunkKey, Use]], None],
        offer_checkpoint: Callable[[Checkpoint], None],
    ) -> None:
        self._index = context.index
        self._counts = context.counts
        self._clock = context.clock
        self._records = records
        self._offer = offer
        self._offer_checkpoint = offer_checkpoint
        self._has_checkpoints = bool(context.checkpoint_groups)
        self._is_enabled = False
        self._recent: set[ChunkKey] = set()  # confirmed since the last rotation
        self._before: set[ChunkKey] = set()  # in the interval before it
        self._rotated_s = 0.0
        # To be asked for, and asked for by the lookup in flight: of a chunk the use, of a checkpoint's record its key.
        self._wanted: dict[ChunkKey, Use | ChunkKey] = {}
        self._asked: dict[ChunkKey, Use | ChunkKey] = {}

    def enable(self) -> None:
        """The tier is shared, and is asked."""
        self._is_enabled = True

    def reset(self) -> None:
        """The keys have changed: nothing is asked for any more."""
        self._is_enabled = False
        self._recent, self._before, self._wanted = set(), set(), {}

    def note(self, names: Iterable[ChunkKey]) -> None:
        """Records were written, read or found."""
        if self._is_enabled:
            self._rotate()
            self._recent.update(names)

    def _rotate(self) -> None:
        """Begins the next interval if it is time, or if the set of this one is full."""
        late_s = self._clock() - self._rotated_s - _INTERVAL_S
        if late_s >= 0 or len(self._recent) >= _MAX_CONFIRMED:
            self._before = self._recent if late_s < _INTERVAL_S else set()
            self._recent = set()
            self._rotated_s = self._clock()

    def use(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """A request uses this prefix: what is known of it and not confirmed is to be asked for. O(keys)."""
        if not self._is_enabled:
            return
        self._rotate()
        self._want(keys, use)
        if self._has_checkpoints:
            get = self._index.checkpoints.get
            last = next((found for key in reversed(keys) if (found := get(key)) is not None), None)
            if last is not None:
                pieces = self._index.checkpoints.pieces_of(last)
                self._want([name for piece in pieces for name in self._records.of_slot(*piece)], last.key)

    def _want(self, names: Iterable[ChunkKey], why: Use | ChunkKey) -> None:
        recent, before, stored = self._recent, self._before, self._records.stored
        for name in names:
            if name in recent or name in before or name not in stored or name in self._asked:
                continue
            if len(self._wanted) >= _MAX_WANTED and name not in self._wanted:
                break  # the next request asks for it
            self._wanted[name] = why

    @property
    def has_wanted(self) -> bool:
        """Whether anything is to be asked for."""
        return bool(self._wanted)

    def drop_wanted(self) -> None:
        """The tier does not answer: later requests ask."""
        self._wanted = {}

    def take(self, most: int) -> list[ChunkKey]:
        """At most so many names for the next lookup; those that were confirmed since, or are being read, are left out.

        None is in flight.
        """
        assert not self._asked, "two lookups ask for what is not confirmed"
        asked, wanted = self._asked, self._wanted
        while wanted and len(asked) < most:
            key = next(iter(wanted))
            why = wanted.pop(key)
            if self._is_doubtful(key):
                asked[key] = why
        return list(asked)

    def answered(self, num_found: Sequence[int]) -> None:
        """The lookup has ended: for each name 1 if the tier has it; nothing if it has failed."""
        asked, self._asked = self._asked, {}
        if not num_found or not self._is_enabled:
            return
        is_found = dict(zip(asked, num_found, strict=True))
        missing = [key for key in asked if not is_found[key] and self._is_doubtful(key)]
        self.note([key for key in asked if is_found[key]])
        for key in missing:
            self._records.remove(key)
        self._counts.vanished_storage_chunks += len(missing)
        chunks: dict[ChunkKey, Use] = {}
        ends: dict[ChunkKey, None] = {}
        for key in missing:
            why = asked[key]
            if not isinstance(why, Use):
                ends[why] = None
            elif self._index.state(key) is ChunkState.READY:
                chunks[key] = why
        self._offer(chunks)
        for end in ends:
            checkpoint = self._index.checkpoints.get(end)
            if checkpoint is not None and not (checkpoint.rolls or checkpoint.num_pending):
                self._offer_checkpoint(checkpoint)

    def _is_doubtful(self, key: ChunkKey) -> bool:
        """Whether it is taken for stored and not confirmed; what is being read soon is, or is missing."""
        is_confirmed = key in self._recent or key in self._before
        return not is_confirmed and key in self._records.stored and key not in self._records.promoting

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tables are bounded, and nothing is asked for twice. For tests."""
        assert len(self._wanted) <= _MAX_WANTED
        assert len(self._asked) <= MAX_ASKED
        assert self._wanted.keys().isdisjoint(self._asked), "what is in flight is asked for again"
        assert self._is_enabled or not (self._recent or self._before or self._wanted)
