"""Simulates one eviction policy at one size over a trace, request by request.

Each request is looked up, loaded, computed and saved before the next one: there are no copies in flight and no staging
buffer. The decisions are the library's own, called in the order in which its scheduler calls them: `ChunkIndex` with
the policy for eviction, `SavePolicy` for admission.

As in the real scheduler, a request uses its whole prompt, wherever the blocks are: blocks that HBM has are also
accessed in the host tier (the policy knows which), and saved again if the host tier has evicted them. Only their hits
are not counted for the host tier.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import final

from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.core.save_policy import SaveBySightings, SaveEvent, SavePolicy
from tpu_offload.core.storage.reads import MAX_PROMOTIONS
from tpu_offload.core.storage.writes import MAX_DEMOTIONS
from tpu_offload.sim.hbm import HBMResult, no_hbm
from tpu_offload.sim.storage import StorageSetup, StorageTier
from tpu_offload.sim.tier import Tier
from tpu_offload.sim.trace import Trace
from tpu_offload.types import ChunkKey


@dataclasses.dataclass(frozen=True, slots=True)
class TierSetup:
    """The tiers behind HBM. A chunk is a block of the trace.

    Attributes:
      num_chunks: capacity of the host tier. Capacity beyond the blocks of the trace takes no memory.
      save_on: when blocks are saved.
      num_sightings: see `SaveBySightings`.
      storage: the storage tiers below the host tier, nearest first.
    """

    num_chunks: int
    save_on: SaveEvent = SaveEvent.COMPUTE
    num_sightings: int = 1
    storage: tuple[StorageSetup, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StorageOutcome:
    """The result of one storage tier.

    Attributes:
      hits: per request, blocks that hit there.
      num_written: chunks written to it.
      num_evicted: chunks that it evicted.
      num_dropped: chunks that the host tier evicted, and for which it had no room.
    """

    hits: tuple[int, ...]
    num_written: int = 0
    num_evicted: int = 0
    num_dropped: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation. A prompt block hits in at most one tier, and only if all blocks before it hit.

    Attributes:
      host_hits: per request, blocks that hit in the host tier.
      storage: of each storage tier, nearest first.
      num_saved: chunks saved to the host tier from HBM.
      num_promoted: chunks read into the host tier from storage.
      num_evicted: chunks that the host tier evicted.
      num_dropped: chunks for which the host tier had no room.
    """

    host_hits: tuple[int, ...]
    storage: tuple[StorageOutcome, ...] = ()
    num_saved: int = 0
    num_promoted: int = 0
    num_evicted: int = 0
    num_dropped: int = 0


def replay(trace: Trace, policy: EvictionPolicy, setup: TierSetup, *, hbm_result: HBMResult | None = None) -> Outcome:
    """Simulates a trace, starting with empty tiers.

    Args:
      trace: the requests.
      policy: a new policy for the host tier.
      setup: the tiers behind HBM.
      hbm_result: result of `simulate_hbm`. By default there is no HBM, and with saves on eviction a prompt is saved at
        the end of its request.
    """
    hbm_result = hbm_result or no_hbm(trace)
    replayed = _Replay(trace, policy, setup)
    keys_of = trace.keys
    for number, request in enumerate(trace.requests):
        keys = [keys_of[block] for block in request.blocks]
        replayed.serve(keys, in_hbm=hbm_result.hits[number], evicted=hbm_result.evicted[number])
    return replayed.outcome()


type _Read = tuple[int, Sequence[ChunkKey]]  # the number of a tier, and what is read from it


@final
class _Replay:
    def __init__(self, trace: Trace, policy: EvictionPolicy, setup: TierSetup) -> None:
        self._trace = trace
        parents = _parents(trace) if setup.storage else {}
        above = itertools.accumulate((tier.num_chunks for tier in setup.storage), initial=setup.num_chunks)
        self._storage = [
            StorageTier(tier, num_blocks=trace.num_blocks, num_above=num_above, parents=parents)
            for tier, num_above in zip(setup.storage, above, strict=False)
        ]
        self._demotes = any(tier.demotes for tier in self._storage)
        self._host = Tier(
            policy,
            num_chunks=min(setup.num_chunks, len(trace.keys)),
            record=self._demotes,
            is_stored=self._is_held if self._storage and not self._demotes else None,
        )
        # Of half of the host tier an equal share is for the promotions of each tier.
        self._most_read = min(MAX_PROMOTIONS, setup.num_chunks // (2 * max(1, len(setup.storage))))
        self._saves: SavePolicy = SaveBySightings(events=(setup.save_on,), num_sightings=setup.num_sightings)
        # Sightings are counted per occurrence, so the sketch is sized by the occurrences of blocks, not by unique ones.
        self._saves.resize(min(setup.num_chunks, trace.num_blocks))
        self._uses = map(Use, itertools.count())
        self._host_hits: list[int] = []
        self._storage_hits: list[list[int]] = [[] for _ in self._storage]

    def serve(self, keys: Sequence[ChunkKey], *, in_hbm: int, evicted: Sequence[int]) -> None:
        """Serves one request, from lookup to end."""
        host, saves = self._host, self._saves
        use = next(self._uses).replace(num_in_hbm=in_hbm, num_in_storage=self._num_stored(keys))
        saves.observe(use, keys)
        in_host = host.find(keys)
        found_above = in_host
        for tier in self._storage:
            tier.observe(use, keys, in_host, found_above)
            found_above += len(tier.leading(itertools.islice(keys, found_above, None)))
        self._host_hits.append(max(in_hbm, in_host) - in_hbm)
        if self._storage:
            in_host = self._read_storage(use, keys, in_hbm=in_hbm, in_host=in_host)
        promised = keys[:in_host] if in_host > in_hbm else ()
        host.touch(use, keys, len(promised))
        if promised:
            for tier in self._storage:
                tier.hit(use, promised)
            self._settle()
        if saves.saves_on(SaveEvent.HBM_EVICTION):
            host.pin(promised)
            for prefix in self._prefixes(evicted):
                eviction = next(self._uses).replace(is_request=False)
                host.save(eviction, prefix, saves.num_chunks_worth_saving(prefix, 0, len(prefix)))
            self._settle()
            host.unpin(promised)
        end = 0
        if saves.saves_on(SaveEvent.COMPUTE):
            end = saves.num_chunks_worth_saving(keys, 0, len(keys))
            self._save(use, keys, end)
        self._settle()
        host.touch(use, keys, len(keys))
        for tier in self._storage:
            tier.finish(use, keys)

    def _num_stored(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks storage has, as a policy is told: 0 if a tier takes what the host tier evicts."""
        if self._demotes:
            return 0
        has = (any(key in tier for tier in self._storage) for key in keys)
        return sum(itertools.takewhile(bool, has))

    def _is_held(self, key: ChunkKey) -> bool:
        return any(tier.holds(key) for tier in self._storage)

    def _read_storage(self, use: Use, keys: Sequence[ChunkKey], *, in_hbm: int, in_host: int) -> int:
        """Promotes what follows in storage, run by run, and counts the hits; returns how far the host tier has it.

        Each run is from the nearest tier that has the next chunk.
        """
        hits = [0] * len(self._storage)
        found = max(in_hbm, in_host)
        while found < len(keys):
            reads = self._plan_reads(use, keys, in_host=in_host, found=found)
            if not reads:
                break
            self._step(use, reads)
            self._settle()
            for number, new in reads:
                end = in_host + len(new)
                hits[number] += max(0, end - max(found, in_host))
                in_host = end
            if in_host <= found:  # what HBM has and the host tier has not is read first, and some of that is missing
                break
            found = in_host
        for all_hits, num in zip(self._storage_hits, hits, strict=True):
            all_hits.append(num)
        return in_host

    def _plan_reads(self, use: Use, keys: Sequence[ChunkKey], *, in_host: int, found: int) -> list[_Read]:
        """Starts to read the next runs, of the nearest tiers that have the chunk after those found."""
        host, reads, end = self._host, list[_Read](), in_host
        for number, tier in enumerate(self._storage):
            if end > found:
                break
            if keys[found] in tier:
                run = tier.leading(keys[end : found + self._most_read])
                new = host.promote(use, keys, end, min(len(run), self._most_read))
                if new:
                    tier.read(new)
                    reads.append((number, new))
                    end += len(new)
        return reads

    def _save(self, use: Use, keys: Sequence[ChunkKey], end: int) -> None:
        """Saves the first chunks of a prompt, or uses them if the tier has them all.

        Where evictions are demoted it saves in pieces of what a step can demote, as by an engine that computes a long
        prompt in several steps.
        """
        if self._demotes:
            for part in range(self._host.find(keys) + MAX_DEMOTIONS, end, MAX_DEMOTIONS):
                self._host.save(use, keys, part)
                self._settle()
        if end and not self._host.save(use, keys, end):
            self._host.touch(use, keys, end)

    def _settle(self) -> None:
        """Steps until nothing is in flight."""
        host = self._host
        while host.has_copies or any(tier.has_plans for tier in self._storage):
            self._step()

    def _step(self, use: Use | None = None, reads: Sequence[_Read] = ()) -> None:
        """What was evicted is demoted, candidates are written, and then the copies of the step end.

        Args:
          use: of the request for which something is read.
          reads: what is being read. What comes from a tier is offered to nearer ones, and to those that take what the
            host tier evicts.
        """
        if self._demotes:
            evicted = self._host.take_evicted()
            for tier in self._storage:
                if tier.demotes:
                    tier.demote(evicted)
        for tier in self._storage:
            if tier.has_plans:
                tier.write(self._host.has)
            tier.end_step()
        saved = self._host.settle()
        if use is None:
            for tier in self._storage:
                for saver, new in saved:
                    tier.offer(saver, new)
        else:
            for number, new in reads:
                for nearer, tier in enumerate(self._storage):
                    if nearer < number or tier.demotes:
                        tier.offer(use, new)

    def outcome(self) -> Outcome:
        """The result so far."""
        return Outcome(
            host_hits=tuple(self._host_hits),
            storage=tuple(
                StorageOutcome(tuple(hits), tier.num_written, tier.num_evicted, tier.num_dropped)
                for tier, hits in zip(self._storage, self._storage_hits, strict=True)
            ),
            num_saved=self._host.num_saved,
            num_promoted=self._host.num_promoted,
            num_evicted=self._host.num_evicted,
            num_dropped=self._host.num_dropped,
        )

    def _prefixes(self, evicted: Iterable[int]) -> Iterable[list[ChunkKey]]:
        """The prefixes that end at blocks evicted from HBM.

        Of nested prefixes only the longest, which comes first. The blocks before the evicted one are included although
        HBM still has them: without them in the host tier it could not be found.
        """
        keys, parents = self._trace.keys, self._trace.parents
        covered: set[int] = set()
        for block in evicted:
            number = block
            prefix = []
            while number >= 0 and block not in covered:
                prefix.append(number)
                number = parents[number]
            covered.update(prefix)
            if prefix:
                yield [keys[number] for number in reversed(prefix)]


def _parents(trace: Trace) -> dict[ChunkKey, ChunkKey]:
    """For each chunk that does not begin a prompt the one before it."""
    keys = trace.keys
    return {key: keys[parent] for key, parent in zip(keys, trace.parents, strict=True) if parent >= 0}
