"""Hit density: keeps the chunks with the most expected uses per unit of space and time.

Consecutive chunks of a prefix that were used by the same requests are a run: they mostly share their future. The class
of a run says how often it has been used: a run used twice is used again more often than one used once. Of a run used
many times the rate of use is known better than by that: its class says how long it waited between uses lately. Among
runs used once the class says how often the chunks before them were used: the beginning of a prompt, the next turn of a
conversation and a question about a popular document differ. Runs that waited long for their last use, and runs used
once that follow them, are told apart while that matters; so are those that begin a prompt, by their length: a scan of
long documents that never return is not like chats. The time to the next use of each class is learned from all runs,
including evicted ones, which are tracked for a while (see `lifetimes`). Nothing else is assumed of the traffic.

The victim is the tail of the run whose class and age have the lowest value (see `runs`). Of those that storage has as
well, evicting one loses less, so they go before others of twice their value.

The last chunk of a prompt may be a special case: where it holds a few last tokens (as in traces), or text that only
this prompt ends with, the next prompt continues without it. How often that happens is learned too; where it is the
rule, these chunks are evicted first.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.core.policies.run_classes import (
    CLASS_USES,
    MANY_USES,
    PARTS,
    POOLS,
    class_of,
    is_length,
    origin_of,
    part_of_interval,
    part_of_length,
    shortest_interval,
)
from tpu_offload.core.policies.run_keys import RunKeys, RunTable
from tpu_offload.core.policies.runs import Run, RunQueues, num_alike, num_common
from tpu_offload.types import ChunkKey

TRACKED = 4  # evicted chunks that are tracked, per chunk that fits the tier,
MIN_TRACKED = 2**13  # and at least
END_WEIGHT = 1 / 64  # of the last prompt in the running mean for the ends of prompts


@final
class DensityPolicy(EvictionPolicy):
    """Evicts the chunk with the fewest expected hits per unit of space and time.

    Attributes:
      end_chance: how often a prompt that continues an earlier one contains its last chunk, a running mean.
    """

    def __init__(self) -> None:
        self._runs = RunTable()  # of every chunk, resident or tracked
        self._num_known = 0
        self._num_resident = 0
        self._queues = RunQueues(CLASS_USES, POOLS, parts=PARTS)
        self._newest_use_id = -1
        self._tracked: deque[tuple[int, int]] = deque()  # runs with evicted chunks: number and lifetime
        self._max_tracked = MIN_TRACKED
        # Runs that end with the last chunk of a prompt: number and ticket.
        self._ends: deque[tuple[int, int]] = deque()
        self.end_chance = 1.0
        self._shortest = 0  # interval between uses that is told from longer ones

    def resize(self, num_chunks: int) -> None:
        """See the base class. O(1)."""
        self._max_tracked = max(MIN_TRACKED, num_chunks * TRACKED)
        self._shortest = shortest_interval(num_chunks)
        self._queues.resize(num_chunks)
        self._forget_oldest()

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> None:
        """See the base class. O(chunks), in C loops unless some of them are tracked."""
        self._advance(use, len(keys))
        self._num_resident += len(keys)
        before = None if parent is None else self._runs.get(parent)
        if before is not None and before.use_id == use.use_id and before.keys[-1] == parent and _is_open(before):
            run = self._extend(before, keys)
        else:
            run = self._add(use, keys, before, depth)
        if run is None:
            run = self._insert_known(use, keys, before, depth)
        self._queues.place(run)
        if run.num_uses == 1:
            run.at_end = True
            self._ends.append((run.number, run.ticket))
            while self._runs.with_ticket(self._ends[0]) is None:
                self._ends.popleft()
            if len(self._ends) > self._runs.max_entries:  # stale ones in the middle
                self._ends = deque(entry for entry in self._ends if self._runs.with_ticket(entry))
        self._forget_oldest()

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """See the base class. O(runs of the prefix + log chunks), and O(1) for each unknown chunk."""
        use_id, i = use.use_id, 0
        if use_id > self._newest_use_id:
            self._advance(use, num_chunks)
        last: Run | None = None
        while i < num_chunks:
            run = self._runs.get(keys[i])
            if run is None:
                i, last = self._runs.next_known(keys, i + 1, num_chunks), None
                continue
            num = len(run.keys)
            if num > 1 and (num > num_chunks - i or run.keys[-1] != keys[i + num - 1]):
                num = num_common(run, keys, i, num_chunks)
            if use_id > run.use_id:
                if run.depth < use.num_in_hbm < run.depth + num:
                    num = use.num_in_hbm - run.depth
                run = self._use(run, num, keys, i + num, use)
                if last is not None:
                    run = self._join(last, run)
                last = run
            else:  # a run that the prompt leaves before its end is not joined with what the prompt has next
                last = run if num == len(run.keys) else None
            i += num

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """See the base class. O(chunks of its run); O(1) for its ends, as a whole long prompt may be lost."""
        run = self._runs[key]
        keys = run.keys
        if keys[0] == key:
            keys.pop_head()
            run.depth += 1
        else:
            place = _place(run, key)
            if place + 1 < len(keys) // 2:
                run = self._split_head(run, place + 1)
            elif place + 1 < len(keys):
                self._split(run, place + 1)
            run.keys.pop()
            run.at_end = False
        del self._runs[key]
        self._num_known -= 1
        if not run.keys:
            self._runs.remove(run)
        self._queues.resize_run(run, -1)
        self._num_resident -= 1
        run.num_resident -= 1
        if not run.num_resident:
            run.ticket += 1
        if parent is not None:
            self.became_leaf(parent)

    def became_leaf(self, key: ChunkKey) -> None:
        """See the base class. O(1)."""
        self._queues.place(self._runs[key])

    def clear(self) -> list[Entries]:
        """See the base class."""
        held: list[Entries] = [*self._runs.clear(), self._tracked, self._ends, *self._queues.clear()]
        self._tracked, self._ends = deque(), deque()
        self._num_resident = self._num_known = 0
        return held

    def evict(self, num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks + runs that cannot be evicted), and O(queues) when they are sorted."""
        if self.end_chance < 0.5:
            num_chunks -= self._evict_ends(num_chunks, residents)
        for run in self._evict_in_order(num_chunks, residents):
            self._queues.place(run)

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """See the base class."""
        runs = self._runs.runs()
        assert all(len(run.keys) for run in runs), "a run without chunks"
        assert sum(len(run.keys) for run in runs) == len(self._runs) == self._num_known, "a chunk has no run or two"
        for run in runs:
            assert all(self._runs[key] is run for key in run.keys), "a run has a chunk of another"
            for i, key in enumerate(run.keys):
                assert (key in residents) == (i < run.num_resident), "a run has the wrong number of resident chunks"
        self._queues.check_invariants(runs)
        assert self._num_resident == sum(run.num_resident for run in runs)
        assert len(self._runs) - self._num_resident <= self._max_tracked, "too many chunks are tracked"
        waiting = self._queues.waiting()
        for leaf in leaves:
            run = self._runs[leaf]
            assert run.keys[run.num_resident - 1] == leaf, "a leaf is inside a run"
            assert id(run) in waiting, "a leaf is in no queue: it would never be evicted"

    # Runs.

    def _extend(self, run: Run, keys: Sequence[ChunkKey]) -> Run | None:
        """Extends a run by resident chunks; does nothing and returns None if one of them is known."""
        if not self._runs.assign_new(keys, run):
            return None
        run.keys.extend(keys)
        run.num_resident += len(keys)
        self._num_known += len(keys)
        self._queues.resize_run(run, len(keys))
        if is_length(run.class_id):
            self._queues.change_class(run, part_of_length(len(run.keys)))
        return run

    def _add(self, use: Use, keys: Sequence[ChunkKey], before: Run | None, depth: int) -> Run | None:
        """A new run of resident chunks; does nothing and returns None if one of them is known."""
        origin = part_of_length(len(keys)) if before is None else origin_of(before.num_uses, before.class_id)
        run = Run(RunKeys(keys), depth=depth, num_resident=len(keys), use_id=use.use_id)
        if not self._runs.add_new(run, keys):
            return None
        self._num_known += len(keys)
        self._queues.begin(run, origin)
        return run

    def _insert_known(self, use: Use, keys: Sequence[ChunkKey], before: Run | None, depth: int) -> Run:
        """Inserts chunks some of which were evicted before and are tracked. Returns the run of the last."""
        runs, i, num_keys = self._runs, 0, len(keys)
        run = before
        while i < num_keys:
            before, run = run, runs.get(keys[i])
            if run is None:
                end = next((j for j in range(i + 1, num_keys) if keys[j] in runs), num_keys)
                run = self._add(use, keys[i:end], before, depth + i)
            else:
                if run.keys[0] != keys[i]:  # the chunks before it in its run are resident by now
                    run = self._split(run, run.keys.index(keys[i]))
                end = i + num_common(run, keys, i, num_keys)
                if use.is_request:
                    run = self._use(run, end - i, keys, end, use)
                else:  # no use: its lifetime goes on
                    run = self._first(run, end - i)
                    run.life += 1
                run.num_resident = len(run.keys)
            i = end
        assert run is not None
        return run

    def _use(self, run: Run, num_chunks: int, keys: Sequence[ChunkKey], next_chunk: int, use: Use) -> Run:
        """A prompt uses the first chunks of a run and goes on with `keys[next_chunk]`. Returns their run."""
        if run.at_end or run.end is not None:
            self._learn_end(run, num_chunks, keys, next_chunk)
        run = self._first(run, num_chunks)
        interval = math.log2(max(1, self._queues.now - run.time))
        run.interval += (interval - run.interval) / min(run.num_uses, MANY_USES)
        run.num_uses, run.use_id = run.num_uses + 1, use.use_id
        # If HBM served it, that is no hit of this tier, but begins a new lifetime too: HBM has the chunks again. If
        # storage has it, only the time to read it would be saved.
        elsewhere = 1.0 if run.depth < use.num_in_hbm else 0.0
        if run.depth < use.num_in_storage and not elsewhere:
            elsewhere = use.storage_worth * min(1.0, (use.num_in_storage - run.depth) / len(run.keys))
        class_id = class_of(run.num_uses, run.interval, self._shortest)
        part = part_of_interval(class_id, interval, self._shortest)
        self._queues.renew(run, part, elsewhere=elsewhere)
        self._place_and_track(run)
        return run

    def _first(self, run: Run, num_chunks: int) -> Run:
        """The run of the first chunks of a run, which is split if it has more, and no longer the end of a prompt."""
        if num_chunks < len(run.keys) // 2 and run.time != self._queues.now:
            return self._split_head(run, num_chunks)
        if num_chunks < len(run.keys):
            self._split(run, num_chunks)
        run.at_end = False
        return run

    def _split_head(self, run: Run, num_chunks: int) -> Run:
        """As `_split`, but the run keeps its last chunks, and a new run of its first ones is returned.

        So a long run of which successive steps use a little more each time is not traversed each time.
        """
        head = Run(
            run.keys.split_head(num_chunks),
            depth=run.depth,
            num_resident=min(num_chunks, run.num_resident),
            use_id=run.use_id,
            num_uses=run.num_uses,
            interval=run.interval,
        )
        head.time, head.class_id, head.slice = run.time, run.class_id, run.slice
        run.depth += num_chunks
        run.num_resident -= head.num_resident
        self._runs.add(head)
        run.end_entries()
        self._place_and_track(run)
        return head

    def _split(self, run: Run, num_chunks: int) -> Run:
        """Leaves a run its first chunks and returns a new run of the others."""
        num_resident = max(0, run.num_resident - num_chunks)
        rest = Run(
            run.keys.split(num_chunks),
            depth=run.depth + num_chunks,
            num_resident=num_resident,
            use_id=run.use_id,
            num_uses=run.num_uses,
            interval=run.interval,
        )
        rest.time, rest.class_id, rest.slice = run.time, run.class_id, run.slice
        rest.at_end, rest.end, run.at_end, run.end = run.at_end, run.end, False, None
        run.num_resident -= num_resident
        self._runs.add(rest)
        self._place_and_track(rest)
        return rest

    def _join(self, run: Run, other: Run) -> Run:
        """Merges two consecutive runs that were just used, if they are of the same class and part.

        The shorter one is merged into the longer one. Returns the run of the other's chunks.
        """
        if run.class_id != other.class_id or run.num_resident != len(run.keys) or run.use_id != other.use_id:
            return other
        num_uses = max(run.num_uses, other.num_uses)
        self._queues.resize_run(other, -len(other.keys))  # its lifetime may have begun later: the use came in two parts
        self._queues.resize_run(run, len(other.keys))
        if len(run.keys) >= len(other.keys):
            other.end_entries()
            self._runs.assign(other.keys, run)
            self._runs.remove(other)
            run.keys.append_all(other.keys)
            run.num_resident += other.num_resident
        else:
            run.end_entries()
            other.end_entries()
            self._runs.assign(run.keys, other)
            self._runs.remove(run)
            other.keys.prepend_all(run.keys)
            other.num_resident += run.num_resident
            other.depth, other.time, other.slice = run.depth, run.time, run.slice
            other.at_end, other.end = run.at_end, run.end
            run = other
        run.num_uses = num_uses
        self._place_and_track(run)
        return run

    def _place_and_track(self, run: Run) -> None:
        if run.num_resident:
            self._queues.place(run)
        if run.num_resident < len(run.keys):
            self._tracked.append((run.number, run.life))
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Keeps the queue of tracked runs short: also while requests use chunks, and nothing is saved."""
        if len(self._tracked) > self._runs.max_entries:
            self._tracked = deque(dict.fromkeys(entry for entry in self._tracked if self._runs.with_life(entry)))

    def _forget_oldest(self) -> None:
        """Stops tracking the chunks evicted longest ago while too many are tracked."""
        while self._num_known - self._num_resident > self._max_tracked:
            run = self._runs.with_life(self._tracked.popleft())
            if run is None or run.num_resident >= len(run.keys):
                continue  # it was used again: it is tracked since later, or resident
            keys = run.keys.split(run.num_resident) if run.num_resident else run.keys
            self._queues.end(run, len(keys), used=False)
            self._runs.drop_all(keys)
            self._num_known -= len(keys)
            if not run.num_resident:
                self._runs.remove(run)
        self._drop_stale()

    def _advance(self, use: Use, num_chunks: int) -> None:
        self._newest_use_id = max(self._newest_use_id, use.use_id)
        self._queues.advance(num_chunks)

    # Ends of prompts.

    def _learn_end(self, run: Run, num_chunks: int, keys: Sequence[ChunkKey], next_chunk: int) -> None:
        """Learns whether a prompt that uses a run also uses the chunk that was the last of the run's first prompt."""
        end, run.end = run.end, None
        if end is not None:
            if num_chunks == len(run.keys) and next_chunk < len(keys):
                self.end_chance += ((keys[next_chunk] == end) - self.end_chance) * END_WEIGHT
        elif run.at_end and num_chunks >= len(run.keys) - 1:
            self.end_chance += ((num_chunks == len(run.keys)) - self.end_chance) * END_WEIGHT

    def _evict_ends(self, num_chunks: int, residents: Residents) -> int:
        """Evicts last chunks of prompts, but not of the newest; returns how many. They are not tracked."""
        num_evicted = 0
        while self._ends and num_evicted < num_chunks:
            run = self._runs.with_ticket(self._ends[0])
            if run is not None and run.use_id == self._newest_use_id:
                break
            self._ends.popleft()
            if run is not None and _is_open(run) and len(run.keys) > 1 and residents.evict_tail(run.keys[-1], 1)[0]:
                num_evicted += 1
                run.end = run.keys.pop()
                run.num_resident -= 1
                self._num_resident -= 1
                self._queues.resize_run(run, -1)
                del self._runs[run.end]
                self._num_known -= 1
        return num_evicted

    # Victims.

    def _evict_in_order(self, num_chunks: int, residents: Residents) -> list[Run]:
        """Returns the runs that cannot be evicted now, to be placed again."""
        kept: list[Run] = []
        is_stored = residents.is_stored
        while num_chunks and (queue := self._queues.least()) is not None:
            run, ticket = queue[0]
            if run.ticket != ticket:
                queue.popleft()
                continue
            if not self._queues.is_in(run, queue):
                queue.popleft()
                self._queues.place(run)
                continue
            num_resident, num_keys = run.num_resident, len(run.keys)
            tail = run.keys[-1 if num_resident == num_keys else num_resident - 1]
            most = min(num_chunks, num_resident)
            if is_stored is not None:
                only_here = self._queues.is_for_only_here(run, queue)
                if is_stored(tail) is only_here:
                    queue.popleft()
                    self._queues.place(run, only_here=not only_here)
                    continue
                most = num_alike(run, most, is_stored)
            num_evicted, stopped_at = residents.evict_tail(tail, most)
            num_chunks -= num_evicted
            self._num_resident -= num_evicted
            if num_evicted and num_resident == num_keys:
                self._tracked.append((run.number, run.life))
            run.num_resident -= num_evicted
            if run.num_resident and (not num_chunks or num_evicted == most):
                continue
            queue.popleft()
            run.ticket += 1
            if stopped_at is not None and residents.is_leaf(stopped_at):  # else those that follow it come first
                if run.num_resident:
                    kept.append(run)
                else:
                    self._queues.place(self._runs[stopped_at])
        return kept


def _is_open(run: Run) -> bool:
    """Whether chunks that the same use saves next belong to this run too."""
    return run.at_end and run.end is None and run.num_uses == 1 and run.num_resident == len(run.keys)


def _place(run: Run, key: ChunkKey) -> int:
    """The index of a chunk in its run; mostly that of the last resident one."""
    last = max(0, run.num_resident - 1)
    return last if run.keys[last] == key else run.keys.index(key)
