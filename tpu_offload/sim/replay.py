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
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import final

from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.core.save_policy import SaveBySightings, SaveEvent, SavePolicy
from tpu_offload.sim.hbm import HBMResult, no_hbm
from tpu_offload.sim.storage import StorageSetup, StorageStack
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
      storage: the storage tiers below it, nearest first.
    """

    num_chunks: int
    save_on: SaveEvent = SaveEvent.COMPUTE
    num_sightings: int = 1
    storage: tuple[StorageSetup, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation. A prompt block hits in at most one tier, and only if all blocks before it hit.

    Attributes:
      host_hits: per request, blocks that hit in the host tier.
      storage_hits: per storage tier and request, blocks that hit in that tier.
      num_saved: chunks saved to the host tier, including promotions from storage.
      num_evicted: chunks that the host tier evicted.
      num_dropped: chunks for which the host tier had no room.
      num_stored: per storage tier, chunks written to it.
    """

    host_hits: tuple[int, ...]
    storage_hits: tuple[tuple[int, ...], ...] = ()
    num_saved: int = 0
    num_evicted: int = 0
    num_dropped: int = 0
    num_stored: tuple[int, ...] = ()


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


@final
class _Replay:
    def __init__(self, trace: Trace, policy: EvictionPolicy, setup: TierSetup) -> None:
        self._trace = trace
        # The sketch of admission is sized by the occurrences of blocks, like that of sightings below.
        self._storage = StorageStack(setup.storage, trace.num_blocks)
        self._demotes = self._storage.demotes
        self._host = Tier(policy, num_chunks=min(setup.num_chunks, len(trace.keys)), record=self._demotes)
        self._saves: SavePolicy = SaveBySightings(events=(setup.save_on,), num_sightings=setup.num_sightings)
        # Sightings are counted per occurrence, so the sketch is sized by the occurrences of blocks, not by unique ones.
        self._saves.resize(min(setup.num_chunks, trace.num_blocks))
        self._uses = map(Use, itertools.count())
        self._hits: list[int] = []
        self._storage_hits: list[list[int]] = [[] for _ in setup.storage]

    def serve(self, keys: Sequence[ChunkKey], *, in_hbm: int, evicted: Sequence[int]) -> None:
        """Serves one request, from lookup to end."""
        host, storage, saves = self._host, self._storage, self._saves
        use = dataclasses.replace(next(self._uses), num_in_hbm=in_hbm)
        saves.observe(use, keys)
        in_host = host.find(keys)
        storage.observe(keys, keys[:in_host], is_hit=in_host > in_hbm)
        found = max(in_hbm, in_host)
        sources = storage.find(keys, found)
        self._hits.append(found - in_hbm)
        for tier_id, hits in enumerate(self._storage_hits):
            hits.append(sources.count(tier_id))
        promised = keys[:in_host] if in_host > in_hbm else ()
        host.touch(use, keys, len(promised))
        if saves.saves_on(SaveEvent.HBM_EVICTION):
            host.pin(promised)
            for prefix in self._prefixes(evicted):
                self._save(next(self._uses), prefix, saves.num_chunks_worth_saving(prefix, 0, len(prefix)))
            host.settle()
            host.unpin(promised)
        promoted = dict(zip(keys[found:], sources, strict=False))
        found += len(sources)
        end = found if sources else 0  # hits in storage are promoted to the host tier
        if saves.saves_on(SaveEvent.COMPUTE):
            end = max(end, saves.num_chunks_worth_saving(keys, 0, len(keys)))
        self._save(use, keys, end, promoted)
        host.settle()
        host.touch(use, keys, max(end, found))
        storage.touch(keys)

    def outcome(self) -> Outcome:
        """The result so far."""
        return Outcome(
            host_hits=tuple(self._hits),
            storage_hits=tuple(map(tuple, self._storage_hits)),
            num_saved=self._host.num_saved,
            num_evicted=self._host.num_evicted,
            num_dropped=self._host.num_dropped,
            num_stored=tuple(tier.num_saved for tier in self._storage.tiers),
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

    def _save(
        self, use: Use, keys: Sequence[ChunkKey], end: int, promoted: Mapping[ChunkKey, int] = MappingProxyType({})
    ) -> None:
        """Saves the first `end` chunks.

        Args:
          use: the request's.
          keys: a prefix.
          end: how much of it.
          promoted: the chunks that were read from storage, and from which tier.
        """
        if not end:
            return
        new = self._host.save(use, keys, end)
        if self._demotes:
            self._storage.demote(self._host.take_evicted())
        if self._storage.tiers:
            self._storage.save(new, promoted.get)
