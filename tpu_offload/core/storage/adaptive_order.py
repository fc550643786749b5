"""The better of two orders of eviction, for a private storage tier of chunks of full attention.

Which order is better for a tier that is hardly larger than the host tier depends on the traffic. By the same policy
storage keeps what the host tier keeps as well; by another it keeps what is not worth keeping. So both are simulated:
each has the names of what the tier would hold if it alone decided, and the one that finds more of what HBM, the host
tier and nearer tiers lack is followed. The tier evicts first what that one does not hold, then what it would evict next
(Subramanian, Smaragdakis and Loh, "Adaptive Caches: Effective Shaping of Cache Behavior to Workloads", MICRO 2006).

What the host tier has after a request does not depend on which order found more of it: what storage lacks is computed
and saved. So both can be compared on the same requests. Where chunks are written when they are saved, an order gets
then what it lacks itself. Where they are written when the host tier evicts them, at most so many in a step, it writes
the first ones that it lacks itself, which may be others than the tier writes.
"""

import itertools
import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import final

from tpu_offload.core.chunk_table import Discarded
from tpu_offload.core.index import NO_PARENT
from tpu_offload.core.index.chunk_index import MAX_FREED
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.eviction_order import EvictionOrder, WrittenChunk, run_end
from tpu_offload.types import ChunkKey

_COST = 0.5
"""How far the other order has to be ahead, as a share of the chunks that it holds and the tier does not.

To follow it costs at most as many: each is found missing once, and written. Simulated tiers lost at most 0.003 of the
hits; with 0, 0.25 and 1 up to 0.009 by changes that gained nothing or came too late.
"""
_SIGMAS = 1.0  # likewise, in standard deviations of the difference; as good with 1.5, 2 changes too late
_MAX_WRITTEN = 512  # chunks of one request that a simulated order is given at once
_HALF_LIFE = 16.0  # of what was found, in capacities of the tier that were written since; as good with 8 or 32

_logger = logging.getLogger(__name__)


@final
class AdaptiveOrder(EvictionOrder):
    """Evicts as the better one of two orders would.

    Args:
      orders: both by name, empty; the first is followed until the other has found more.
      capacity: most chunks that are stored.
      label: of the tier, for the log.
      expects: chunks are written when the host tier evicts them, not when they are saved.

    Attributes:
      followed: the name of the order that is followed.
      num_switches: how often that has changed.
    """

    compares = True

    def __init__(self, orders: dict[str, EvictionOrder], capacity: int, *, label: str, expects: bool = False) -> None:
        self.expects = expects
        (first, order), (second, other) = orders.items()
        self._first = self._followed = _SimulatedOrder(first, order, capacity)
        self._second = self._other = _SimulatedOrder(second, other, capacity)
        self._label = label
        self._half_life = _HALF_LIFE * capacity
        self._discarded = Discarded()
        self._names: dict[ChunkKey, None] = {}
        self.stored = self._names
        # Chunks that the other one has found and the followed one has not, since that was ahead; the sum of the squared
        # differences of all requests. Both decay.
        self._lead = self._variance = 0.0
        self.num_switches = 0

    @property
    def followed(self) -> str:
        """See the class."""
        return self._followed.name

    def holds(self, name: ChunkKey) -> bool:
        """See the base class. By both orders: else the host tier would come to complement the one that is followed.

        That one would find more of what the host tier lacks, whichever it is, and the other would never be followed.
        """
        return name in self._names and name in self._first.order.stored and name in self._second.order.stored

    def begin(self, use: Use, keys: Sequence[ChunkKey], num_above: int) -> None:
        """See the base class. O(keys)."""
        if num_above < len(keys):
            self._compare(keys, num_above, num_in_hbm=use.num_in_hbm)
            if not self.expects:
                self._first.write_missing(use, keys, num_above, self._names)
                self._second.write_missing(use, keys, num_above, self._names)
        self.use(use, keys)

    def _compare(self, keys: Sequence[ChunkKey], first: int, *, num_in_hbm: int) -> None:
        """Follows the other order if it has found more of late of what neither HBM nor the tiers above have."""
        found, found_by_other = self._followed.num_found(keys, first), self._other.num_found(keys, first)
        num_written = len(keys) - first - max(found, found_by_other)
        if num_written:
            decay = 0.5 ** (num_written / self._half_life)
            self._lead *= decay
            self._variance *= decay
        num_of_no_use = max(0, num_in_hbm - first)  # storage is read from `first` on
        difference = max(found_by_other, num_of_no_use) - max(found, num_of_no_use)
        if not difference:
            return
        self._lead = max(0.0, self._lead + difference)
        self._variance += difference**2
        if self._lead > max(_SIGMAS * math.sqrt(self._variance), _COST * self._other.num_missing(len(self._names))):
            _logger.info(
                "%s evicts by %s from now on: it would have found %d chunks more than %s",
                self._label, self._other.name, round(self._lead), self._followed.name,
            )  # fmt: skip
            self._followed, self._other = self._other, self._followed
            self._lead = 0.0
            self.num_switches += 1

    def use(self, use: Use, keys: Sequence[ChunkKey]) -> None:
        """See the base class. O(keys)."""
        self._first.order.use(use, keys)
        self._second.order.use(use, keys)

    def touch(self, names: Iterable[ChunkKey]) -> None:
        """See the base class."""
        read = list(names)
        self._first.order.touch(read)
        self._second.order.touch(read)

    def add(self, name: ChunkKey) -> None:
        """See the base class."""
        if name in self._names:
            return
        self._names[name] = None
        for simulated in (self._first, self._second):
            simulated.add(name, self._names)

    def add_written(self, chunks: Sequence[WrittenChunk]) -> None:
        """See the base class."""
        names = [key for _, key, _ in chunks]
        self._names.update(dict.fromkeys(names))
        for simulated in (self._first, self._second):
            if self.expects:  # each was told of all that the host tier evicted, and has written what it would
                simulated.note_surplus(names, self._names)
            else:
                simulated.write(chunks, self._names)

    def host_evicted(self, chunks: Sequence[WrittenChunk], most: int) -> None:
        """See the base class. Each order writes other ones, because it has others already."""
        self._first.write(chunks, self._names, most=most)
        self._second.write(chunks, self._names, most=most)

    def remove(self, name: ChunkKey) -> None:
        """See the base class."""
        del self._names[name]
        for simulated in (self._first, self._second):
            simulated.surplus.pop(name, None)
            if name in simulated.order.stored:
                simulated.order.remove(name)

    def evict(self, num_records: int, kept: Container[ChunkKey]) -> Sequence[ChunkKey]:
        """See the base class. O(records + those that are kept)."""
        followed = self._followed
        surplus = (name for name in followed.surplus if name not in kept)
        evicted = list(itertools.islice(surplus, max(0, num_records)))
        for name in evicted:
            self._drop(name)
        # What is left is in the followed order. It may also hold what is not stored: what the tier evicted before.
        while (num_left := num_records - len(evicted)) > 0 and (names := followed.order.evict(num_left, kept)):
            for name in names:
                if name in self._names:
                    self._drop(name)
                    evicted.append(name)
        return evicted

    def _drop(self, name: ChunkKey) -> None:
        """Is evicted. An order that would still have it keeps it."""
        del self._names[name]
        self._first.surplus.pop(name, None)
        self._second.surplus.pop(name, None)

    def clear(self) -> None:
        """See the base class. What was found before still counts."""
        self._discarded.add(self._names)
        self._names = {}
        self.stored = self._names
        for simulated in (self._first, self._second):
            self._discarded.add(simulated.surplus)
            simulated.surplus = OrderedDict()
            simulated.order.clear()

    def expect(self, chunks: Sequence[WrittenChunk]) -> None:
        """See the base class."""
        self._first.order.expect(chunks)
        self._second.order.expect(chunks)

    def drop_expected(self, name: ChunkKey) -> None:
        """See the base class."""
        self._first.order.drop_expected(name)
        self._second.order.drop_expected(name)

    def tidy(self, is_coming: Callable[[ChunkKey], bool]) -> None:
        """See the base class."""
        if self._discarded:
            self._discarded.free(MAX_FREED)
        self._first.order.tidy(is_coming)
        self._second.order.tidy(is_coming)

    def check_invariants(self) -> None:
        """See the base class."""
        for simulated in (self._first, self._second):
            simulated.check_invariants(self._names)
            held = simulated.order.stored
            assert all(name in held or name in simulated.surplus for name in self._names), "a chunk is never evicted"


@final
class _SimulatedOrder:
    """What the tier would hold if one order alone decided.

    Attributes:
      name: for the log.
      order: it.
      surplus: stored chunks that it has evicted, in its order.
    """

    def __init__(self, name: str, order: EvictionOrder, capacity: int) -> None:
        self.name = name
        self.order = order
        self.surplus: OrderedDict[ChunkKey, None] = OrderedDict()
        self._capacity = capacity

    def num_found(self, keys: Sequence[ChunkKey], first: int) -> int:
        """How many of the chunks from `first` on it has, up to the first one that it lacks."""
        return run_end(self.order.stored, keys, first) - first

    def num_missing(self, num_stored: int) -> int:
        """How many of the chunks that it holds are not stored."""
        return len(self.order.stored) - (num_stored - len(self.surplus))

    def write_missing(self, use: Use, keys: Sequence[ChunkKey], first: int, stored: Container[ChunkKey]) -> None:
        """A request has the chunks from `first` on written that storage lacks: here also those that the tier has.

        As many as this takes 1 ms for; what is left, when it is used again.
        """
        surplus = self.surplus
        if surplus and not surplus.keys().isdisjoint(keys):
            places = (i for i in range(first, len(keys)) if keys[i] in surplus)
            missing = itertools.islice(places, _MAX_WRITTEN)
            self.write([(use, keys[i], keys[i - 1] if i else NO_PARENT) for i in missing], stored)

    def add(self, name: ChunkKey, stored: Container[ChunkKey]) -> None:
        """A chunk is stored of which nothing else is known."""
        if name in self.order.stored:
            return
        if self._make_room(1, stored):
            self.order.add(name)
        else:
            self._leave_out([name], stored)

    def write(self, chunks: Sequence[WrittenChunk], stored: Container[ChunkKey], *, most: int = sys.maxsize) -> None:
        """Writes those of the chunks that it has not, at most so many."""
        held = self.order.stored
        new = [chunk for chunk in chunks if chunk[1] not in held]
        room = self._make_room(min(len(new), most), stored)
        self._leave_out([key for _, key, _ in new[room:]], stored)
        for _, key, _ in new[:room]:
            self.surplus.pop(key, None)
        self.order.add_written(new[:room])

    def _make_room(self, num_chunks: int, stored: Container[ChunkKey]) -> int:
        """Evicts what is in the way of so many chunks; returns how many have room: chunks before expected ones stay."""
        short = len(self.order.stored) + num_chunks - self._capacity
        if short <= 0:
            return num_chunks
        evicted = self.order.evict(short, ())
        self.note_surplus(evicted, stored)
        return num_chunks - (short - len(evicted))

    def _leave_out(self, names: Sequence[ChunkKey], stored: Container[ChunkKey]) -> None:
        """These are not written."""
        for name in reversed(names):  # tails before heads
            self.order.drop_expected(name)
        self.note_surplus(names, stored)

    def note_surplus(self, names: Sequence[ChunkKey], stored: Container[ChunkKey]) -> None:
        """Those of the chunks that are stored, and that it has not, are surplus."""
        held = self.order.stored
        for name in names:
            if name in stored and name not in held:
                self.surplus[name] = None

    def check_invariants(self, stored: Container[ChunkKey]) -> None:
        """Raises AssertionError unless each stored chunk is either in the order or surplus."""
        self.order.check_invariants()
        held, surplus = set(self.order.stored), self.surplus.keys()
        assert len(held) <= self._capacity, "a simulated order holds more than the tier can"
        assert held.isdisjoint(surplus), "surplus is what the order does not hold"
        assert all(name in stored for name in surplus), "what is not stored cannot be evicted"
