"""Runs of chunks, and the queues in which they await eviction.

Runs of one class whose lifetimes began in the same time slice share a queue. The first eviction after the end of a
slice sorts the queues by the value of their runs. So the next victim is found without looking at all runs, and no run
moves because it ages. Old slices are merged: the older they are, the coarser ages may be.

Each run first awaits eviction as one that storage has, too. Whether it has its tail is asked when the run is the next
victim; if not, the run goes to another queue of its class and slice, where it is worth more, and stays there until it
is used.

Until the next sort a heap has the queues with entries. A queue that was empty gets its first entry when a run that
others followed becomes a leaf. That run is the next victim if its value is the lowest, so the queue joins the heap.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.policies.lifetimes import Lifetimes
from tpu_offload.core.policies.run_keys import RunKeys
from tpu_offload.types import ChunkKey

MIN_SLICE = 128  # chunks used; 64 gives a tier of 100 chunks more hits in loops, but costs every small tier more
SLICES = 16  # while as many chunks are used as fit the tier
LEARN_EVERY = 2048  # chunks used
HALF_LIFE = 2**13  # runs
ONLY_HERE = 2.0  # times as much is a run worth that storage lacks as one of its class and age that storage has, too


@final
class Run:
    """Consecutive chunks of a prefix, head first, with one history. The first `num_resident` of them are resident.

    Attributes:
      depth: chunks before it in its prefix.
      num_uses: how often they have been used.
      interval: the time between uses, as the mean of its binary logarithms; the last 16 count most.
      use_id: the last use.
      at_end: the last chunk was the last one of the prompt that saved it.
      end: that chunk, if it was evicted early because such chunks are rarely used again.
      class_id: its class, or the part of a class, since its lifetime began.
      time: when that was.
      slice: the time slice of that.
      ticket: queue entries with another ticket are stale.
      number: identifies it in the table of runs.
      life: entries of tracked runs with another one are stale; changes when a lifetime begins at another time, and when
        it is saved again.
    """

    __slots__ = (
        "at_end",
        "class_id",
        "depth",
        "end",
        "interval",
        "keys",
        "life",
        "num_resident",
        "num_uses",
        "number",
        "slice",
        "ticket",
        "time",
        "use_id",
    )

    slice: "TimeSlice"
    class_id: int
    time: int

    def __init__(
        self,
        keys: RunKeys,
        *,
        depth: int,
        num_resident: int,
        use_id: int,
        num_uses: int = 1,
        interval: float = 0.0,
    ) -> None:
        self.keys = keys
        self.depth = depth
        self.num_resident = num_resident
        self.use_id = use_id
        self.num_uses = num_uses
        self.interval = interval
        self.at_end = False
        self.end: ChunkKey | None = None
        self.ticket = 0
        self.life = 0
        self.number = -1

    def end_entries(self) -> None:
        """Its entries in queues are stale from now on."""
        self.ticket += 1
        self.life += 1


type Queue = deque[tuple[Run, int]]


@final
class TimeSlice:
    """A time slice, and the lifetimes that began in it, by class.

    Attributes:
      start: when it begins; it ends where the next one begins.
      alive: chunks of each class whose lifetimes began in it and still run.
      num_alive: the sum of these.
      begun: the sum of the times when they began.
      queues: the runs that await eviction, by class or part, and after all these numbers those that storage lacks,
        likewise. Most classes have none in most slices.
      first: when the queues were last sorted, the number of its first queue, and
      first_density: where the values of the runs in its queues begin in `Lifetimes.densities`.
      merged: the later slice that it was merged into.
    """

    __slots__ = ("alive", "begun", "first", "first_density", "merged", "num_alive", "queues", "start")

    def __init__(self, start: int, *, num_classes: int) -> None:
        self.start = start
        self.alive = [0] * num_classes
        self.num_alive = 0
        self.begun = 0
        self.queues: dict[int, Queue] = {}
        self.first = 0
        self.first_density = 0
        self.merged: TimeSlice | None = None

    def mean_time(self, end: int) -> int:
        """When its running lifetimes began, on average; the middle of the slice, which ends then, if it has none.

        The oldest are used first, so what is left may have begun long after the middle. In a loop just these are used
        next, and would seem to be overdue.
        """
        return self.begun // self.num_alive if self.num_alive else (self.start + end) // 2

    def take_in(self, older: "TimeSlice") -> None:
        """Merges an older slice, the one before it, into this one. O(queues + entries of the older)."""
        self.start = older.start
        self.begun += older.begun
        self.num_alive += older.num_alive
        self.alive = [a + b for a, b in zip(self.alive, older.alive, strict=True)]
        for place, theirs in older.queues.items():
            if theirs:
                mine = self.queues.setdefault(place, deque())
                mine.extendleft([entry for entry in reversed(theirs) if entry[0].ticket == entry[1]])
        older.merged = self
        older.queues, older.alive = {}, []  # a run that nothing touches has it for long


@final
class RunQueues:
    """Lifetimes of runs, from begin to end, and the order in which runs are evicted.

    Args:
      num_uses: for each class, about how often its chunks have been used.
      pools: see `Lifetimes`.
      parts: see `Lifetimes`. Runs of a part are in queues of their own while the parts of the class differ, else in
        those of the class.

    Attributes:
      lifetimes: what is known of the time to the next use; `end`, `renew` and `reorder` add to it.
      slices: the time slices so far, oldest first; old ones are merged.
    """

    def __init__(
        self, num_uses: Sequence[float], pools: Sequence[int] | None = None, *, parts: Sequence[int] = ()
    ) -> None:
        self.lifetimes = Lifetimes(num_uses, half_life=HALF_LIFE, pools=pools, parts=parts)
        self._class_of = [*range(len(num_uses)), *parts]  # of each class, itself
        self._queue_of = self._class_of  # the number of its queue in a slice, by class
        self._now = 0
        self.slices = [self._new_slice(0)]
        self._young = 0  # younger ages are not distinguished
        self._slice_size = MIN_SLICE
        self._next_slice = MIN_SLICE
        self._learn_every = LEARN_EVERY
        self._next_learn = LEARN_EVERY
        self._last_learn = 0
        self._last_used = -1, -1  # when the lifetime that a use ended last began, and its class
        self._next_purge = LEARN_EVERY
        self._ordered = False  # since the last slice began
        self._queues: dict[int, Queue] = {}  # by number: those with entries since they were last sorted
        # A heap of values and numbers of queues: all that have entries, and perhaps others.
        self._waiting: list[tuple[float, int]] = []

    @property
    def now(self) -> int:
        """The time, in chunks used."""
        return self._now

    def least(self) -> Queue | None:
        """The queue whose runs have the least value; None when all are empty. O(log queues), amortized."""
        if not self._ordered:
            self.reorder()
        waiting = self._waiting
        while waiting:
            queue = self._queues[waiting[0][1]]
            if queue:
                return queue
            heapq.heappop(waiting)
        return None

    def resize(self, num_chunks: int) -> None:
        """The tier has room for this many chunks from now on."""
        self._young = num_chunks // SLICES
        self._slice_size = max(MIN_SLICE, self._young)
        self._learn_every = max(LEARN_EVERY, self._slice_size)

    def advance(self, num_chunks: int) -> None:
        """Advances the time by this many chunks used. O(1), or O(slices) where a slice ends."""
        self._now += num_chunks
        if self._now >= self._next_slice:
            self._begin_slice()

    def clear(self) -> list[Entries]:
        """Removes all runs, but not the learned statistics; returns what held them. O(queues)."""
        held: list[Entries] = [queue for time_slice in self.slices for queue in time_slice.queues.values()]
        self.slices = [self._new_slice(self._now)]
        self._queues, self._waiting, self._ordered = {}, [], False
        return held

    def begin(self, run: Run, class_id: int) -> None:
        """Begins a lifetime of a run, which awaits eviction only once it is placed."""
        run.class_id = class_id
        run.time = self._now
        run.slice = self.slices[-1]
        self.resize_run(run, len(run.keys))

    def end(self, run: Run, num_chunks: int, *, used: bool) -> None:
        """Ends the lifetime of chunks of a run, by a use or because they are forgotten."""
        self.resize_run(run, -num_chunks)
        self.lifetimes.end(run.class_id, num_chunks, self._now - run.time, used=used)

    def renew(self, run: Run, class_id: int, *, elsewhere: float = 0.0) -> None:
        """A use ends a lifetime and begins the next: as `end` and `begin`, in one call because most calls are these.

        Args:
          run: the run.
          class_id: its class from now on.
          elsewhere: see `Lifetimes.end`.
        """
        num_chunks, now, newest = len(run.keys), self._now, self.slices[-1]
        time_slice = run.slice
        if time_slice is not newest:
            if time_slice.merged is not None:
                time_slice = self.slice_of(run)
            run.slice = newest
        time_slice.alive[run.class_id] -= num_chunks
        time_slice.num_alive -= num_chunks
        time_slice.begun -= num_chunks * run.time
        newest.alive[class_id] += num_chunks
        newest.num_alive += num_chunks
        newest.begun += num_chunks * now
        begun = run.time, run.class_id
        goes_on = begun == self._last_used
        self.lifetimes.end(run.class_id, num_chunks, now - run.time, used=True, elsewhere=elsewhere, goes_on=goes_on)
        if elsewhere < 1.0:
            self._last_used = begun
        if run.time != now:
            run.life += 1
        run.class_id, run.time = class_id, now

    def resize_run(self, run: Run, num_chunks: int) -> None:
        """A run has become longer or shorter by this many chunks, without a use."""
        time_slice = self.slice_of(run)
        time_slice.alive[run.class_id] += num_chunks
        time_slice.num_alive += num_chunks
        time_slice.begun += num_chunks * run.time

    def change_class(self, run: Run, class_id: int) -> None:
        """A run belongs to another class since its lifetime began. It is to be placed again."""
        self.resize_run(run, -len(run.keys))
        run.class_id = class_id
        self.resize_run(run, len(run.keys))

    def slice_of(self, run: Run) -> TimeSlice:
        """The time slice in which its lifetime began, or that one was merged into. O(1), amortized."""
        time_slice = run.slice
        while time_slice.merged is not None:
            time_slice = run.slice = time_slice.merged
        return time_slice

    def is_in(self, run: Run, queue: Queue) -> bool:
        """Whether this queue is one of its class and slice; another one is since parts differ, or no longer do."""
        place = self._queue_of[run.class_id]
        queues = self.slice_of(run).queues
        return queues.get(place) is queue or queues.get(place + self.lifetimes.num_classes) is queue

    def is_for_only_here(self, run: Run, queue: Queue) -> bool:
        """Whether the queue, in which the run is, is for runs that storage lacks."""
        return self.slice_of(run).queues.get(self._queue_of[run.class_id]) is not queue

    def place(self, run: Run, *, only_here: bool = False) -> None:
        """Puts a run at the end of its queue, and nowhere else, to await eviction.

        Args:
          run: the run.
          only_here: whether it is known that storage lacks it.
        """
        run.ticket = ticket = run.ticket + 1
        time_slice = run.slice if run.slice.merged is None else self.slice_of(run)
        place = self._queue_of[run.class_id]
        if only_here:
            place += self.lifetimes.num_classes
        queue = time_slice.queues.get(place)
        if queue is None:
            queue = time_slice.queues[place] = deque()
        if not queue and self._ordered:
            number = time_slice.first + place
            self._queues[number] = queue
            heapq.heappush(self._waiting, (self._value(time_slice.first_density, place), number))
        queue.append((run, ticket))

    def reorder(self) -> None:
        """Sorts all queues by value. O(slices + queues that exist)."""
        self._ordered = True
        slices = self.slices
        ends = [time_slice.start for time_slice in slices[1:]] + [self._now]
        ages = [self._now - time_slice.mean_time(end) for time_slice, end in zip(slices, ends, strict=True)]
        if self._now >= self._next_learn:
            elapsed, self._last_learn = self._now - self._last_learn, self._now
            self._next_learn = self._now + self._learn_every
            alive = [time_slice.alive for time_slice in slices]
            # After a pause (nothing was evicted) the ages of what was alive meanwhile are not known.
            elapsed = elapsed if elapsed <= 2 * self._learn_every else 0
            self.lifetimes.learn(ages, alive, youngest=self._young, elapsed=elapsed)
            self._set_apart(self.lifetimes.parts_differ())
        queues: dict[int, Queue] = {}
        waiting: list[tuple[float, int]] = []
        first = 0
        for time_slice, age in zip(slices, ages, strict=True):
            time_slice.first = first
            time_slice.first_density = first_density = self.lifetimes.first_density(age)
            for place, queue in time_slice.queues.items():
                if queue:
                    queues[first + place] = queue
                    waiting.append((self._value(first_density, place), first + place))
            first += 2 * self.lifetimes.num_classes
        waiting.sort()  # so it is a heap
        self._queues, self._waiting = queues, waiting

    def check_invariants(self, runs: Sequence[Run]) -> None:
        """Raises AssertionError unless exactly the lifetimes of these runs are running. For tests."""
        alive: dict[tuple[int, int], int] = {}
        begun: dict[int, int] = {}
        for run in runs:
            slice_id = id(self.slice_of(run))
            begun[slice_id] = begun.get(slice_id, 0) + len(run.keys) * run.time
            where = slice_id, run.class_id
            alive[where] = alive.get(where, 0) + len(run.keys)
        for time_slice in self.slices:
            assert begun.get(id(time_slice), 0) == time_slice.begun, "a lifetime began at another time"
            for class_id, num_alive in enumerate(time_slice.alive):
                assert alive.pop((id(time_slice), class_id), 0) == num_alive, "a lifetime was not begun or not ended"
            assert sum(time_slice.alive) == time_slice.num_alive, "the sum over the classes of a slice is wrong"
        assert not any(alive.values()), "a lifetime is in a slice that does not exist"

    def waiting(self) -> set[int]:
        """The `id()`s of the runs that await eviction. For tests."""
        queues = [queue for time_slice in self.slices for queue in time_slice.queues.values()]
        return {id(run) for queue in queues for run, ticket in queue if run.ticket == ticket}

    def order(self) -> list[Queue]:
        """The queues with entries, the one with the least value first. For tests."""
        if not self._ordered:
            self.reorder()
        return [queue for _, number in sorted(set(self._waiting)) if (queue := self._queues[number])]

    def num_entries(self) -> int:
        """Entries of all queues, stale ones too. For tests."""
        return sum(len(queue) for time_slice in self.slices for queue in time_slice.queues.values())

    def _new_slice(self, start: int) -> TimeSlice:
        return TimeSlice(start, num_classes=self.lifetimes.num_classes)

    def _value(self, first_density: int, place: int) -> float:
        """What the runs in a queue are worth."""
        num_classes = self.lifetimes.num_classes
        densities = self.lifetimes.densities
        if place < num_classes:
            return densities[first_density + place]
        return ONLY_HERE * densities[first_density + place - num_classes]

    def _set_apart(self, differ: list[bool]) -> None:
        """For each class whether its runs are placed in queues of their parts from now on."""
        self._queue_of = [i if differ[class_id] else class_id for i, class_id in enumerate(self._class_of)]

    def _begin_slice(self) -> None:
        merged = self.slices[:1]
        for time_slice in self.slices[1:]:
            if time_slice.start - merged[-1].start + self._slice_size <= (self._now - time_slice.start) // 8:
                time_slice.take_in(merged.pop())
            merged.append(time_slice)
        self.slices = [*merged, self._new_slice(self._now)]
        self._next_slice = self._now + self._slice_size
        self._ordered = False  # sorted on demand: never while there is room for all
        if self._now >= self._next_purge:
            self._next_purge = self._now + self._learn_every
            self._purge_stale()

    def _purge_stale(self) -> None:
        """Stale entries are mostly at the old end; others are removed when their slice is evicted from."""
        for time_slice in self.slices:
            for queue in time_slice.queues.values():
                while queue and queue[0][0].ticket != queue[0][1]:
                    queue.popleft()
            time_slice.queues = {place: queue for place, queue in time_slice.queues.items() if queue}


def num_common(run: Run, keys: Sequence[ChunkKey], first: int, end: int) -> int:
    """The length of the common prefix of a run and `keys[first:end]`; at least one."""
    ours = run.keys
    most = min(len(ours), end - first)
    if ours[most - 1] == keys[first + most - 1]:
        return most
    low, high = 1, most - 1  # a key depends on all chunks before it: once different, always different
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == keys[first + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def num_alike(run: Run, most: int, is_stored: Callable[[ChunkKey], bool]) -> int:
    """How many of its last resident chunks, at most so many, storage has, or lacks, as it has or lacks the last one."""
    last = run.num_resident - 1
    has_last = most > 1 and is_stored(run.keys[last])
    for i in range(1, most):
        if is_stored(run.keys[last - i]) is not has_last:
            return i
    return most
