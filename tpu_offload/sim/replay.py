"""One eviction policy at one size over a trace, request after request.

Each request is looked up, loaded, computed and saved before the next one comes: there are no copies in flight and
no staging buffer. What the library decides is asked of the library itself, in the order in which its scheduler asks:
`ChunkIndex` with the policy for what is kept, `SavePolicy` for what is saved.

In the real scheduler a request uses its prompt as a whole, wherever its blocks were: those that HBM had are used in
the host tier too (policies are told which those are), and saved again where the host tier has lost them. So it is here.
Only hits are not counted for the host tier where HBM had the block.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import final

from tpu_offload.core.policies import EvictionPolicy, Use
from tpu_offload.core.save_policy import SaveBySightings, SaveEvent, SavePolicy
from tpu_offload.sim.hbm import Front, no_front
from tpu_offload.sim.secondary import SecondaryMode, SecondaryTier
from tpu_offload.sim.tier import Tier
from tpu_offload.sim.trace import Trace
from tpu_offload.types import ChunkKey


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What is behind HBM. A chunk is a block of the trace.

    Attributes:
      num_chunks: room in the host tier. More than the trace has blocks is as good as all of them, and costs no more.
      save_on: when blocks are saved.
      num_sightings: see `SaveBySightings`.
      num_secondary_chunks: room in the secondary tier; 0 has none.
      secondary_mode: when chunks go there.
    """

    num_chunks: int
    save_on: SaveEvent = SaveEvent.COMPUTE
    num_sightings: int = 1
    num_secondary_chunks: int = 0
    secondary_mode: SecondaryMode = SecondaryMode.CASCADE


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. A block of a prompt hits in at most one tier, and only if all blocks before it hit.

    Attributes:
      host_hits: blocks of each request that the host tier had.
      secondary_hits: that the secondary tier had.
      num_saved: chunks brought into the host tier, those from the secondary tier included.
      num_evicted: chunks that the host tier evicted.
      num_dropped: chunks that the host tier had no room for.
      num_secondary_saved: chunks brought into the secondary tier.
    """

    host_hits: tuple[int, ...]
    secondary_hits: tuple[int, ...]
    num_saved: int = 0
    num_evicted: int = 0
    num_dropped: int = 0
    num_secondary_saved: int = 0


def replay(trace: Trace, policy: EvictionPolicy, setup: Setup, *, front: Front | None = None) -> Outcome:
    """Plays a trace against tiers that are empty at first.

    Args:
      trace: what is played.
      policy: of the host tier; a fresh one.
      setup: what there is behind HBM.
      front: what HBM does, by `play_hbm`; by default there is none, and what is saved when HBM evicts is saved at
        the end of its request.
    """
    front = front or no_front(trace)
    replayed = _Replay(trace, policy, setup)
    keys_of = trace.keys
    for number, request in enumerate(trace.requests):
        keys = [keys_of[block] for block in request.blocks]
        replayed.serve(keys, in_hbm=front.hits[number], left=front.left[number])
    return replayed.outcome()


@final
class _Replay:
    def __init__(self, trace: Trace, policy: EvictionPolicy, setup: Setup) -> None:
        self._trace = trace
        has_secondary = setup.num_secondary_chunks > 0
        self._demotes = has_secondary and setup.secondary_mode is SecondaryMode.DEMOTE
        self._host = Tier(policy, num_chunks=min(setup.num_chunks, len(trace.keys)), record=self._demotes)
        self._secondary = SecondaryTier(setup.num_secondary_chunks) if has_secondary else None
        self._saves: SavePolicy = SaveBySightings(events=(setup.save_on,), num_sightings=setup.num_sightings)
        # It counts what is seen, again and again: only at the number of all blocks more would change nothing.
        self._saves.resize(min(setup.num_chunks, trace.num_blocks))
        self._uses = map(Use, itertools.count())
        self._hits: list[tuple[int, int]] = []

    def serve(self, keys: Sequence[ChunkKey], *, in_hbm: int, left: Sequence[int]) -> None:
        """One request, from its lookup to its end."""
        host, secondary, saves = self._host, self._secondary, self._saves
        use = dataclasses.replace(next(self._uses), num_in_hbm=in_hbm)
        saves.see(use, keys)
        in_host = host.find(keys)
        found = max(in_hbm, in_host)
        in_secondary = secondary.find(keys, found) if secondary else 0
        self._hits.append((found - in_hbm, in_secondary))
        promised = keys[:in_host] if in_host > in_hbm else ()
        host.touch(use, keys, len(promised))
        if saves.saves_on(SaveEvent.HBM_EVICTION):
            host.pin(promised)
            for prefix in self._prefixes(left):
                self._save(next(self._uses), prefix, saves.num_chunks_worth_saving(prefix, 0, len(prefix)))
            host.settle()
            host.unpin(promised)
        found += in_secondary
        end = found if in_secondary else 0  # what comes from the secondary tier comes through the host tier
        if saves.saves_on(SaveEvent.COMPUTE):
            end = max(end, saves.num_chunks_worth_saving(keys, 0, len(keys)))
        self._save(use, keys, end)
        host.settle()
        host.touch(use, keys, max(end, found))
        if secondary:
            secondary.touch(keys)

    def outcome(self) -> Outcome:
        """What came of all requests."""
        host, secondary = zip(*self._hits, strict=True) if self._hits else ((), ())
        return Outcome(
            host_hits=host,
            secondary_hits=secondary,
            num_saved=self._host.num_saved,
            num_evicted=self._host.num_evicted,
            num_dropped=self._host.num_dropped,
            num_secondary_saved=self._secondary.num_saved if self._secondary else 0,
        )

    def _prefixes(self, left: Iterable[int]) -> Iterable[list[ChunkKey]]:
        """The prefixes that end at blocks which HBM gives up.

        Of a chain of such blocks only the longest, which comes first. The blocks before them go along although HBM
        still has them, unless the host tier has them too: without them nothing could be found.
        """
        keys, parents = self._trace.keys, self._trace.parents
        covered: set[int] = set()
        for block in left:
            number = block
            prefix = []
            while number >= 0 and block not in covered:
                prefix.append(number)
                number = parents[number]
            covered.update(prefix)
            if prefix:
                yield [keys[number] for number in reversed(prefix)]

    def _save(self, use: Use, keys: Sequence[ChunkKey], end: int) -> None:
        if not end:
            return
        new = self._host.save(use, keys, end)
        if self._secondary is None:
            return
        if self._demotes:
            self._secondary.save(self._host.take_evicted())
        else:
            self._secondary.save(reversed(new))
