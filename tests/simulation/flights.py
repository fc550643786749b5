"""The host memory of a simulated worker, and its copies in flight."""

import dataclasses

from tpu_offload import CopyJob, JobResult


@dataclasses.dataclass(slots=True, eq=False)
class Memory:
    """One kind of host memory.

    Attributes:
      places: contents by block position.
      num_ready: units (chunks or blocks) that are allocated.
      lost: positions that were lost and not written since; reading them fails.
      gone: positions not written since the worker restarted; their contents are undefined.
      unreported: ranges that were lost since the last report.
    """

    places: list[tuple[int, ...]]
    num_ready: int = 0
    lost: set[int] = dataclasses.field(default_factory=set)
    gone: set[int] = dataclasses.field(default_factory=set)
    unreported: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def write(self, writes: dict[int, tuple[int, ...]]) -> None:
        for place, content in writes.items():
            self.places[place] = content
        if self.lost:
            self.lost.difference_update(writes)
        if self.gone:
            self.gone.difference_update(writes)


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """A copy in flight.

    Attributes:
      job_id: the job.
      memory: host memory that it writes when due; None if it has written already or writes HBM.
      due: step in which it ends.
      writes: contents by position.
      result: its result.
      into_hbm: whether it is a staged load.
      writes_host: whether it is a save or a swap out.
      num_staged: staging blocks that it holds.
      is_piece: whether it is a piece of a load.
    """

    job_id: int
    memory: Memory | None
    due: int
    writes: dict[int, tuple[int, ...]]
    result: JobResult
    into_hbm: bool = False
    writes_host: bool = False
    num_staged: int = 0
    is_piece: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class LongLoad:
    """A load with pieces to dispatch or in flight.

    Attributes:
      job: the job.
      num_dispatched: number of leading blocks that have been dispatched.
      failed: positions that were not copied.
      failure: the result of the piece that failed.
      is_cancelled: whether it is cancelled: no more of it is written.
    """

    job: CopyJob
    num_dispatched: int = 0
    failed: set[int] = dataclasses.field(default_factory=set)
    failure: JobResult | None = None
    is_cancelled: bool = False
