"""What the worker asks of a copy path, and the records of copies that are on their way."""

import abc
import dataclasses
import enum
from typing import Any, Protocol

import jax
import numpy as np

from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.types import Direction

Ids = np.ndarray[Any, np.dtype[np.int32]]
Caches = list[jax.Array]
Segment = list[jax.Array]
"""One segment of the host pool, an array a part (see `TransferSpec`)."""


class ArenaView(Protocol):
    """Where segments live between programs; a program donates one and hands back its successor."""

    def segment(self, segment_id: int) -> Segment:
        """The segment; raises TransferError if there is none."""

    def replace(self, segment_id: int, segment: Segment) -> None:
        """Puts the successor in the place of a donated segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Blocks that one dispatch copies, of one or more jobs; all arrays have the same length.

    Attributes:
      job_ids: the job that each block belongs to.
      block_ids: i32, blocks of the caches; checked.
      host_block_ids: i32, places in the segment; checked.
    """

    job_ids: np.ndarray[Any, np.dtype[np.int64]]
    block_ids: Ids
    host_block_ids: Ids

    def __len__(self) -> int:
        return len(self.job_ids)

    def take(self, which: Any) -> "Rows":
        """The rows that a slice, a mask or a list of indices selects."""
        return Rows(self.job_ids[which], self.block_ids[which], self.host_block_ids[which])

    def jobs(self) -> list[int]:
        """Ids of the jobs that have rows here, each once, in order of appearance."""
        return list(dict.fromkeys(self.job_ids.tolist()))


class Phase(enum.Enum):
    """How far a flight is."""

    TRANSIT = "transit"  # staged: between host and device; the worker resumes it when `waiting_on` is ready
    COPYING = "copying"  # its last program is dispatched; it has ended when `waiting_on`, the token, is ready


@dataclasses.dataclass(slots=True, eq=False)  # a flight is itself; comparing its arrays has no truth value
class Flight:
    """One dispatched copy between the caches and one segment.

    Attributes:
      direction: save or load.
      segment_id: the segment.
      rows: what it copies.
      phase: how far it is.
      waiting_on: the array whose readiness ends the phase; in the phase COPYING the token, i32[], which
        then has the value `len(rows)`.
      host_staging: an array of the staged path to use again when the flight has ended.
      step_id: the plan that dispatched it.
      fused: the engine's own step copies it.
      num_staged: staging blocks of HBM that it takes until it has ended; 0 on the direct path.
    """

    direction: Direction
    segment_id: int
    rows: Rows
    phase: Phase
    waiting_on: jax.Array
    host_staging: jax.Array | None = None
    step_id: int = 0
    fused: bool = False
    num_staged: int = 0


def fetch_early(token: jax.Array, spec: TransferSpec) -> jax.Array:
    """Has a token sent to the host as soon as it is ready, so that reading it then waits for no round trip."""
    if spec.platform != "cpu":
        token.copy_to_host_async()
    return token


class Copier(abc.ABC):
    """A copy path, for one direction or both. All methods are called by the thread that dispatches the model.

    None of them waits.

    What a program raises comes out of the method that dispatched it. Nothing was copied then that a
    job waits for, but the segment or the caches may have been donated and be gone.
    """

    @property
    @abc.abstractmethod
    def hbm_nbytes(self) -> int:
        """Bytes of HBM that it takes at most on each device, whatever is in flight within the staging budget.

        What the compiler says of its programs, where the backend tells; of programs that are not compiled yet, what
        they may take.
        """

    @property
    @abc.abstractmethod
    def stages(self) -> bool:
        """Whether its flights take a staging block of HBM for each block that they copy."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Compiles what it needs and has not compiled yet; otherwise each program is at its first use.

        Raises:
          CompileError: the compiler refuses a program, or it takes more HBM than it may.
        """

    @abc.abstractmethod
    def split(self, rows: Rows) -> list[Rows]:
        """Cuts rows into pieces that one dispatch can copy; there may be any number, at least one."""

    @abc.abstractmethod
    def save(self, segment_id: int, rows: Rows, kv_caches: Caches) -> Flight:
        """Dispatches a save of one piece; the caches are read in program order, and not donated."""

    @abc.abstractmethod
    def load(self, segment_id: int, rows: Rows, kv_caches: Caches) -> tuple[Flight, Caches]:
        """Dispatches a load of one piece; the caches may be donated, and their successors are returned."""

    @abc.abstractmethod
    def resume_save(self, flight: Flight) -> None:
        """Dispatches the second half of a save in TRANSIT, which is ready; its phase is COPYING then."""

    @abc.abstractmethod
    def resume_load(self, flight: Flight, live: Rows, kv_caches: Caches) -> Caches:
        """Like `resume_save` for a load: writes only `live`, a part of the flight's rows; donates the caches."""

    @abc.abstractmethod
    def release(self, flight: Flight) -> None:
        """Takes back what an ended flight held."""
