"""Hit density: keeps what promises the most uses for the room and the time that it takes.

Chunks that lie side by side in a prefix and were used by the same requests are a run: they mostly have one
fate. The class of a run says how often it has been used: what was used twice comes back more often than what
was used once. How long each class waits for its next use is learnt from all runs, also from those that were
evicted, which are watched for a while longer (see `lifetimes`). Nothing else is assumed of the traffic. As
long as nothing is known, this is LRU by and large.

What goes is the tail of the run whose class and age promise least. Runs of one class that began their life
in the same slice of time wait in one queue; the queues are put in order now and then, when a slice ends. So the
victim is found without looking at all runs, and no run is moved because it grows older.

The last chunk of a prompt may be a special case: where it holds a few last tokens (as in traces) or what only this
prompt ends with, the next prompt goes on without it. How often that is so is learnt too; where it is the rule, these
chunks go first.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.core.policies.lifetimes import Lifetimes
from tpu_offload.types import ChunkKey

_MAXF=256
_POW=1.
_NUM_ORIGINS = 5
_NUM_USES = 9
_NUM_CLASSES = _NUM_ORIGINS + _NUM_USES - 1  # by the power of two below the number of uses; the last is 256 and more
_WATCHED = 4
_MIN_WATCHED=2**15  # chunks that are known after their eviction, for each that there is room for
_HALF_LIFE = 2**14  # runs
_MIN_SLICE = 1024  # chunks used
_SLICES = 16  # for as many uses as there is room for chunks
_END_WEIGHT = 1 / 64


@final
class _Slice:
    """A slice of time, and the runs whose life began in it."""

    __slots__ = ("alive", "merged", "queues", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.alive = [0] * _NUM_CLASSES  # chunks, also watched ones
        self.queues: list[deque[tuple[_Run, int]]] = [deque() for _ in range(_NUM_CLASSES)]
        self.merged: _Slice | None = None  # the later one that it has become a part of

    def take_in(self, older: "_Slice") -> None:
        self.start = older.start
        self.alive = [a + b for a, b in zip(self.alive, older.alive, strict=True)]
        for mine, theirs in zip(self.queues, older.queues, strict=True):
            mine.extendleft(reversed(theirs))
        older.merged = self


@final
class _Run:
    """Chunks of one prefix, head first, with one history. The first `num_resident` of them are resident.

    Attributes:
      at_end: the last of them is the last of the prompt that made them.
      end: that one, if it has been evicted before all others.
      ticket: an entry of a queue with another is void.
      time: when its life began.
      slice: the slice that it began in.
    """

    __slots__ = ("at_end", "class_id", "end", "keys", "num_resident", "num_uses", "slice", "ticket", "time", "use_id", "origin")

    def __init__(self, keys: list[ChunkKey], *, num_resident: int, num_uses: int, at_end: bool, use_id: int) -> None:
        self.keys = keys
        self.num_resident = num_resident
        self.num_uses = num_uses
        self.at_end = at_end
        self.use_id = use_id
        self.end: ChunkKey | None = None
        self.ticket = 0
        self.origin = 0


@final
class DensityPolicy(EvictionPolicy):
    """Evicts the chunk that is expected to bring the fewest hits for the room and time it would take."""

    def __init__(self) -> None:
        self._runs: dict[ChunkKey, _Run] = {}  # of every chunk, resident or watched
        self._num_resident = 0
        self._now = 0  # chunks used so far
        self._newest_use_id = -1
        self._lifetimes = Lifetimes(_NUM_CLASSES, half_life=_HALF_LIFE, factors=[1]*_NUM_ORIGINS+[min(2**i, _MAXF)**_POW for i in range(1,_NUM_USES)])
        self._watched: deque[tuple[_Run, int]] = deque()  # runs of which something was evicted, and of which life
        self._max_watched = 0
        # Runs whose last chunk is the last of a prompt, and how often such a one is used with what is before it.
        self._ends: deque[tuple[_Run, int]] = deque()
        self._end_chance = 1.0
        self._slices = [_Slice(0)]  # oldest first
        self._slice_size = _MIN_SLICE
        self._next_slice = _MIN_SLICE
        self._order = list(self._slices[0].queues)  # those to evict from first; some that were empty are left out

    def resize(self, num_chunks: int) -> None:
        """See the base class. O(1)."""
        self._max_watched = max(_MIN_WATCHED, num_chunks * _WATCHED)
        self._slice_size = max(_MIN_SLICE, num_chunks // _SLICES)

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        """See the base class. O(chunks), in loops inside the interpreter unless some were there before."""
        self._advance(use, len(keys))
        self._num_resident += len(keys)
        if not self._runs.keys().isdisjoint(keys):
            self._insert_known(use, keys, parent)
        else:
            run = None if parent is None else self._runs[parent]
            if run is None or run.use_id != use.use_id or not self._ends_here(run):
                run = self._add(use, keys, run)
            else:  # the prompt goes on, or its answer does
                self._extend(run, keys, num_resident=len(keys))
                run.slice.alive[run.class_id] += len(keys)
            run.at_end = True
            self._place(run)
            self._ends.append((run, run.ticket))
        if len(self._runs) - self._num_resident > self._max_watched:
            self._forget_oldest()

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """See the base class. O(runs of the prefix + log chunks), and O(1) for each chunk that nobody knows."""
        use_id, last, i = use.use_id, None, 0
        if use_id > self._newest_use_id:
            self._advance(use, num_chunks)
        while i < num_chunks:
            run = self._runs.get(keys[i])
            if run is None:
                i += 1
                last = None
                continue
            num = self._num_common(run, keys, i, num_chunks)
            if use_id > run.use_id:
                self._learn_end(run, keys, i + num, num)
                if num < len(run.keys):
                    self._split(run, num)
                self._reuse(run, use_id)
                if last is not None and self._join(last, run):
                    run = last
            last = run
            i += num

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """See the base class. O(chunks of its run)."""
        run = self._runs[key]
        place = run.keys.index(key)
        if place + 1 < len(run.keys):
            self._split(run, place + 1)
        if place:
            run = self._split(run, place)
        self._num_resident -= run.num_resident
        run.num_resident = 0
        run.ticket += 1
        self._watched.append((run, run.time))
        if parent is not None:
            self._place(self._runs[parent])
        if len(self._runs) - self._num_resident > self._max_watched:
            self._forget_oldest()

    def evict(self, num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks + queues + runs that may not go)."""
        if self._end_chance < 0.5:
            num_chunks -= self._evict_ends(num_chunks, residents)
        kept: list[_Run] = []
        num_left = self._evict_in_order(num_chunks, residents, kept) if num_chunks else 0
        while num_left:  # queues that were empty when they were put in order may hold something by now
            self._order = [queue for part in self._slices for queue in part.queues if queue]
            num_chunks, num_left = num_left, self._evict_in_order(num_left, residents, kept)
            if num_left == num_chunks:
                break
        for run in kept:
            self._place(run)

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """See the base class."""
        runs = {id(run): run for run in self._runs.values()}.values()
        assert sum(len(run.keys) for run in runs) == len(self._runs), "a chunk has no run or two"
        alive: dict[tuple[int, int], int] = {}
        for run in runs:
            assert all(self._runs[key] is run for key in run.keys), "a run has a chunk of another"
            for i, key in enumerate(run.keys):
                assert (key in residents) == (i < run.num_resident), "a run is wrong about what is resident"
            where = id(self._slice_of(run)), run.class_id
            alive[where] = alive.get(where, 0) + len(run.keys)
        for part in self._slices:
            for class_id, num_alive in enumerate(part.alive):
                assert alive.get((id(part), class_id), 0) == num_alive, "lives were not begun or not ended"
        assert self._num_resident == sum(run.num_resident for run in runs)
        assert len(self._runs) - self._num_resident <= self._max_watched, "too many are watched"
        queues = [queue for part in self._slices for queue in part.queues]
        queued = {id(run) for queue in queues for run, ticket in queue if run.ticket == ticket}
        for leaf in leaves:
            run = self._runs[leaf]
            assert run.keys[run.num_resident - 1] == leaf, "a leaf is inside a run"
            assert id(run) in queued, "a leaf is in no queue: it would never be evicted"

    # Runs.

    def _add(self, use: Use, keys: Sequence[ChunkKey], parent: _Run | None) -> _Run:
        run = _Run(list(keys), num_resident=len(keys), num_uses=1, at_end=False, use_id=use.use_id)
        run.origin = min(parent.num_uses.bit_length(), _NUM_ORIGINS - 1) if parent else 0
        self._runs.update(dict.fromkeys(keys, run))
        self._begin(run)
        return run

    def _ends_here(self, run: _Run) -> bool:
        """Whether what the same use saves next belongs to a run."""
        return run.at_end and run.end is None and run.num_uses == 1 and run.num_resident == len(run.keys)

    def _insert_known(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        """Some of the chunks were here before and are watched."""
        runs, i, num_keys = self._runs, 0, len(keys)
        run = None if parent is None else runs[parent]
        while i < num_keys:
            before, run = run, runs.get(keys[i])
            if run is None:
                end = next((j for j in range(i + 1, num_keys) if keys[j] in runs), num_keys)
                run = self._add(use, keys[i:end], before)
            else:
                if run.keys[0] != keys[i]:  # what was before it in its run is resident by now
                    run = self._split(run, run.keys.index(keys[i]))
                num = self._num_common(run, keys, i, num_keys)
                self._learn_end(run, keys, i + num, num)
                if num < len(run.keys):
                    self._split(run, num)
                end = i + num
                run.num_resident = num
                self._reuse(run, use.use_id)
            i = end
        if run is not None:
            if run.num_uses == 1:
                run.at_end = True
            self._place(run)

    def _num_common(self, run: _Run, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """How many chunks of a run, from its first, are those of a prefix from `keys[first]` on; at least one is."""
        ours = run.keys
        most = min(len(ours), end - first)
        if ours[most - 1] == keys[first + most - 1]:
            return most
        low, high = 1, most - 1  # a key names all chunks before it: once different, always different
        while low < high:
            middle = (low + high + 1) // 2
            if ours[middle - 1] == keys[first + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, run: _Run, num_chunks: int) -> _Run:
        """Leaves a run its first chunks and returns one of the others."""
        keys = run.keys[num_chunks:]
        num_resident = max(0, run.num_resident - num_chunks)
        rest = _Run(
            keys, num_resident=num_resident, num_uses=run.num_uses, at_end=run.at_end, use_id=run.use_id
        )
        rest.time, rest.class_id, rest.slice, rest.origin = run.time, run.class_id, run.slice, run.origin
        rest.end, run.end, run.at_end = run.end, None, False
        del run.keys[num_chunks:]
        run.num_resident -= num_resident
        self._runs.update(dict.fromkeys(keys, rest))
        if num_resident:
            self._place(rest)
        if num_resident < len(keys):
            self._watched.append((rest, rest.time))
        return rest

    def _join(self, run: _Run, other: _Run) -> bool:
        """Makes two runs that follow each other and were just used one, if they have been used about as often."""
        if run.class_id != other.class_id or run.num_resident != len(run.keys) or run.use_id != other.use_id:
            return False
        run.num_uses = max(run.num_uses, other.num_uses)
        other.ticket += 1
        self._extend(run, other.keys, num_resident=other.num_resident)
        if run.num_resident:
            self._place(run)
        if run.num_resident < len(run.keys):
            self._watched.append((run, run.time))
        return True

    def _extend(self, run: _Run, keys: Sequence[ChunkKey], *, num_resident: int) -> None:
        run.keys += keys
        run.num_resident += num_resident
        self._runs.update(dict.fromkeys(keys, run))

    # Lives.

    def _advance(self, use: Use, num_chunks: int) -> None:
        self._now += num_chunks
        self._newest_use_id = max(self._newest_use_id, use.use_id)
        if self._now >= self._next_slice:
            self._begin_slice()

    def _begin(self, run: _Run) -> None:
        run.time = self._now
        if run.num_uses == 1:
            run.class_id = run.origin
        else:
            run.class_id = _NUM_ORIGINS + min(run.num_uses.bit_length(), _NUM_USES) - 2
        run.slice = self._slices[-1]
        run.slice.alive[run.class_id] += len(run.keys)

    def _end(self, run: _Run, num_chunks: int, *, used: bool) -> None:
        self._slice_of(run).alive[run.class_id] -= num_chunks
        self._lifetimes.end(run.class_id, num_chunks, self._now - run.time, used=used)

    def _reuse(self, run: _Run, use_id: int) -> None:
        self._end(run, len(run.keys), used=True)
        run.num_uses += 1
        run.use_id = use_id
        run.at_end = False
        self._begin(run)
        if run.num_resident:
            self._place(run)
        if run.num_resident < len(run.keys):
            self._watched.append((run, run.time))

    def _forget_oldest(self) -> None:
        """Forgets what was evicted longest ago, beyond what may be watched."""
        while len(self._runs) - self._num_resident > self._max_watched:
            run, time = self._watched.popleft()
            keys = run.keys[run.num_resident :]
            if run.time != time or not keys or self._runs.get(keys[0]) is not run:
                continue  # it was used again, or is watched since later
            self._end(run, len(keys), used=False)
            deque(map(self._runs.__delitem__, keys), maxlen=0)
            del run.keys[run.num_resident :]

    # Ends of prompts.

    def _learn_end(self, run: _Run, keys: Sequence[ChunkKey], next_chunk: int, num_used: int) -> None:
        """A prompt uses the first `num_used` chunks of a run and goes on with `next_chunk`."""
        end = run.end
        if end is not None:
            run.end = None
            if num_used == len(run.keys) and next_chunk < len(keys):
                self._end_chance += ((keys[next_chunk] == end) - self._end_chance) * _END_WEIGHT
        elif run.at_end and num_used >= len(run.keys) - 1:
            self._end_chance += ((num_used == len(run.keys)) - self._end_chance) * _END_WEIGHT

    def _evict_ends(self, num_chunks: int, residents: Residents) -> int:
        """Evicts last chunks of prompts, except for that of the newest; returns how many."""
        num_evicted = 0
        while self._ends and num_evicted < num_chunks:
            run, ticket = self._ends[0]
            if run.ticket == ticket and run.use_id == self._newest_use_id:
                break
            self._ends.popleft()
            if run.ticket != ticket or not self._ends_here(run) or len(run.keys) < 2:
                continue
            if residents.evict(run.keys[-1], 1)[0]:
                num_evicted += 1
                run.end = run.keys.pop()
                run.num_resident -= 1
                self._num_resident -= 1
                self._slice_of(run).alive[run.class_id] -= 1
                del self._runs[run.end]
        return num_evicted

    # Queues.

    def _slice_of(self, run: _Run) -> _Slice:
        part = run.slice
        while part.merged is not None:
            part = run.slice = part.merged
        return part

    def _place(self, run: _Run) -> None:
        """Has a run wait for its eviction, which may come as soon as nothing hangs on it."""
        run.ticket = ticket = run.ticket + 1
        self._slice_of(run).queues[run.class_id].append((run, ticket))

    def _evict_in_order(self, num_chunks: int, residents: Residents, kept: list[_Run]) -> int:
        """Returns how many chunks are left to evict. Runs in `kept` may not go now and have to be placed again."""
        for queue in self._order:
            while queue:
                run, ticket = queue[0]
                if run.ticket != ticket:
                    queue.popleft()
                    continue
                num_evicted, rest = residents.evict(
                    run.keys[run.num_resident - 1], min(num_chunks, run.num_resident)
                )
                if num_evicted:
                    num_chunks -= num_evicted
                    self._num_resident -= num_evicted
                    if run.num_resident == len(run.keys):
                        self._watched.append((run, run.time))
                    run.num_resident -= num_evicted
                    if not num_chunks and run.num_resident:
                        return 0
                queue.popleft()
                run.ticket += 1
                # What hangs on another comes back when that goes.
                if rest is not None and residents.is_leaf(rest):
                    if run.num_resident:
                        kept.append(run)
                    else:
                        self._place(self._runs[rest])
                if not num_chunks:
                    return 0
        return num_chunks

    def _begin_slice(self) -> None:
        """Begins a slice, and puts the queues in order by what is known by now."""
        slices = self._slices
        merged = slices[:1]
        for part in slices[1:]:  # the older, the less their ages have to be told apart
            if part.start - merged[-1].start + self._slice_size <= (self._now - part.start) // 8:
                part.take_in(merged.pop())
            merged.append(part)
        self._slices = slices = [*merged, _Slice(self._now)]
        for part in slices:
            for queue in part.queues:
                while queue and queue[0][0].ticket != queue[0][1]:
                    queue.popleft()
        ages = [self._now - part.start for part in slices[1:]] + [0]  # each as old as its youngest
        densities = self._lifetimes.densities([max(age, 1) for age in ages], [part.alive for part in slices])
        by_density = densities.ravel().argsort(kind="stable").tolist()
        queues = [queue for part in slices for queue in part.queues]
        newest = len(queues) - _NUM_CLASSES
        self._order = [queues[i] for i in by_density if queues[i] or i >= newest]
        self._next_slice = self._now + self._slice_size
