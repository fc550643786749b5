"""The jobs of one storage tier: how they are planned, and which are in flight."""

from collections.abc import Sequence
from typing import final

from tpu_offload.config import DEFAULT_BREAKER_FAILURES, StorageTierConfig
from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.core.context import TierContext
from tpu_offload.core.holdings import Holdings
from tpu_offload.core.host_writes import HostWrites
from tpu_offload.core.jobs import Job
from tpu_offload.core.storage.records import StoredRecords
from tpu_offload.types import STORAGE_WRITES, ChunkKey, JobKind

WRITES = (*STORAGE_WRITES, JobKind.DEMOTE)
STORAGE_JOBS = (JobKind.LOOKUP, JobKind.PROMOTE, *WRITES)
ACCOUNT = "storage"  # for the circuit breakers


@final
class TierJobs:
    """Plans jobs of one tier.

    Args:
      context: the scheduler's shared state.
      tier: the settings of the tier.
      records: the tier's.
    """

    def __init__(self, context: TierContext, tier: StorageTierConfig, records: StoredRecords) -> None:
        self._jobs = context.jobs
        self._config = context.config
        self._clock = context.clock
        self._tier_id = tier.tier_id
        self._label = tier.label
        self._records = records
        self.breakers: list[CircuitBreaker] = []

    def make_breaker(self, what: str, *, repeated: bool = False) -> CircuitBreaker:
        """A circuit breaker for one kind of its jobs; those `repeated` until they succeed always have a limit."""
        config = self._config
        breaker = CircuitBreaker(
            f"{what} {self._label}",
            num_failures=config.breaker_failures or (DEFAULT_BREAKER_FAILURES if repeated else 0),
            retry_s=config.breaker_retry_s,
            clock=self._clock,
        )
        self.breakers.append(breaker)
        return breaker

    def of(self, *kinds: JobKind) -> list[Job]:
        """Those in flight."""
        return [job for job in self._jobs.of(*kinds) if job.wire.tier_id == self._tier_id]

    def late(self) -> list[Job]:
        """Those that timed out and may still run."""
        return [job for job in self._jobs.late(*STORAGE_JOBS) if job.wire.tier_id == self._tier_id]

    def plan(
        self,
        kind: JobKind,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        breaker: CircuitBreaker,
        *,
        now_s: float,
        writes: HostWrites | None = None,
        deleted: tuple[ChunkKey, ...] = (),
        num_timeouts: int = 1,
    ) -> Job:
        """Plans a job that copies what is in these slots, deletes records, or empties the tier.

        It may take as many job timeouts as `num_timeouts`.
        """
        what = {JobKind.CLEAR: "everything", JobKind.DELETE: f"{len(deleted)} keys"}.get(kind, f"{len(keys)} chunks")
        return self._jobs.plan(
            kind,
            (),
            Holdings(kind.direction, breaker, keys=tuple(keys), slots=tuple(slots)),
            request=f"{what} in {self._label}",
            writes=writes,
            deleted_keys=deleted,
            tier_id=self._tier_id,
            nbytes=self._records.nbytes(slots),
            deadline_s=now_s + num_timeouts * self._config.job_timeout_s,
        )
