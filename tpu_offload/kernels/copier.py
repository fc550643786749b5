"""The interface of a copy path, and the records of copies in flight."""

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
"""One segment of the host pool, an array a stripe (see `TransferSpec`)."""


class ArenaView(Protocol):
    """The part of `HostArena` that copiers use: a program takes a segment by donation and returns its successor."""

    def segment(self, segment_id: int) -> Segment:
        """The segment; raises TransferError if it does not exist or is lost."""

    def replace(self, segment_id: int, segment: Segment) -> None:
        """Stores the successor of a donated segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockMoves:
    """The block moves between the caches and one segment, of one or more jobs; all arrays have the same length.

    Attributes:
      job_ids: the job of each block.
      block_ids: i32, block ids in the caches; validated.
      host_block_ids: i32, block positions in the segment; validated.
      ranks: i32, the data-parallel rank of each block, whose caches and part of the segment the ids are in; None with
        one rank.
    """

    job_ids: np.ndarray[Any, np.dtype[np.int64]]
    block_ids: Ids
    host_block_ids: Ids
    ranks: Ids | None = None

    def __len__(self) -> int:
        return len(self.job_ids)

    def take(self, which: Any) -> "BlockMoves":
        """The moves selected by a slice, a mask or a list of indices."""
        ranks = None if self.ranks is None else self.ranks[which]
        return BlockMoves(self.job_ids[which], self.block_ids[which], self.host_block_ids[which], ranks)

    def jobs(self) -> list[int]:
        """Ids of the jobs in these moves, each once, in order of appearance."""
        return list(dict.fromkeys(self.job_ids.tolist()))


class Phase(enum.Enum):
    """The phase of a flight."""

    TRANSIT = "transit"  # staged only: between host and device; the worker resumes it when `waiting_on` is ready
    COPYING = "copying"  # the last program is dispatched; the flight has ended when `waiting_on`, the token, is ready


@dataclasses.dataclass(slots=True, eq=False)  # compared by identity: comparing its arrays has no truth value
class Flight:
    """One dispatched copy between the caches and one segment.

    Attributes:
      direction: save or load.
      segment_id: the segment.
      moves: what it copies.
      phase: see `Phase`.
      waiting_on: the array whose readiness ends the phase. While COPYING it is the token: how many blocks were copied,
        i32[], or of each rank i32[num_ranks].
      host_staging: host staging array of the staged path, reused after the flight has ended.
      step_id: the plan that dispatched it.
      fused: whether the engine's own step copies it.
      num_staged: staging blocks of HBM that it holds until it has ended; 0 on the direct path.
    """

    direction: Direction
    segment_id: int
    moves: BlockMoves
    phase: Phase
    waiting_on: jax.Array
    host_staging: jax.Array | None = None
    step_id: int = 0
    fused: bool = False
    num_staged: int = 0


def fetch_early(token: jax.Array, spec: TransferSpec) -> jax.Array:
    """Starts the token's transfer to the host, so that reading it once it is ready needs no round trip."""
    if spec.platform != "cpu":
        token.copy_to_host_async()
    return token


class Copier(abc.ABC):
    """A copy path, for one direction or both.

    All methods are called from the thread that dispatches the model, and none blocks. An exception at dispatch is
    raised by the method that dispatched the program. The copy has not happened then, and the segment or the caches may
    be lost if they were donated.
    """

    @property
    @abc.abstractmethod
    def hbm_nbytes(self) -> int:
        """Upper bound on the HBM that it takes on each device, with any copies in flight within the staging budget.

        From the compiler where the backend reports it; for programs that are not compiled yet, their bound.
        """

    @property
    @abc.abstractmethod
    def stages(self) -> bool:
        """Whether its flights hold a staging block of HBM for each block that they copy."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Compiles all programs now; without this call each is compiled on first use.

        Raises:
          CompileError: the compiler rejects a program, or the program exceeds its HBM bound.
        """

    @abc.abstractmethod
    def split(self, moves: BlockMoves) -> list[BlockMoves]:
        """Splits moves (at least one) into pieces that one dispatch can copy."""

    @abc.abstractmethod
    def save(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> Flight:
        """Dispatches a save of one piece. The caches are read in program order and not donated."""

    @abc.abstractmethod
    def load(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> tuple[Flight, Caches]:
        """Dispatches a load of one piece. The caches may be donated; their successors are returned."""

    @abc.abstractmethod
    def resume_save(self, flight: Flight) -> None:
        """Dispatches the second half of a save whose TRANSIT is complete; its phase becomes COPYING."""

    @abc.abstractmethod
    def resume_load(self, flight: Flight, live: BlockMoves, kv_caches: Caches) -> Caches:
        """Like `resume_save`, for a load: writes only `live`, a subset of the flight's moves; donates the caches."""

    @abc.abstractmethod
    def release(self, flight: Flight) -> None:
        """Takes back the buffers of a flight that was copied. Those of a failed one, maybe broken, are not reused."""
