"""From computed blocks to save jobs: what is worth saving, is not there yet, and fits."""

from collections.abc import Iterable

from tpu_offload.core.index import ChunkIndex, ChunkState, NewChunk
from tpu_offload.core.jobs import Job, JobTable
from tpu_offload.core.requests import ScheduledRequest
from tpu_offload.core.save_policy import SavePolicy
from tpu_offload.core.staging import StagingBufferManager
from tpu_offload.core.tracking import TrackedRequest
from tpu_offload.types import ChunkKey, Direction

_MAX_FAILED_SAVES = 2


class SavePlanner:
    """The save half of the scheduler.

    Chunks of a request are saved in order, and only whole. Those that find no room, in the staging
    buffer or in the host tier, are offered again in every later step until the request ends, so a saved
    prefix never has a hole.
    """

    def __init__(
        self,
        index: ChunkIndex,
        staging: StagingBufferManager,
        jobs: JobTable,
        policy: SavePolicy,
        *,
        block_size: int,
        blocks_per_chunk: int,
    ) -> None:
        self._index = index
        self._staging = staging
        self._jobs = jobs
        self._policy = policy
        self._block_size = block_size
        self._blocks_per_chunk = blocks_per_chunk

    def num_chunks_to_save(self, scheduled: ScheduledRequest) -> int:
        """Leading chunks of the request that should be in the host tier after the coming step."""
        num_tokens = self._policy.num_tokens_to_save(
            num_prompt_tokens=scheduled.num_prompt_tokens, num_computed_tokens=scheduled.num_computed_tokens
        )
        num_blocks = min(num_tokens // self._block_size, len(scheduled.block_hashes), len(scheduled.block_ids))
        return num_blocks // self._blocks_per_chunk

    def plan(
        self, request: TrackedRequest, scheduled: ScheduledRequest, num_chunks: int, *, deadline_s: float
    ) -> tuple[Job | None, int]:
        """Plans the save of what is missing among the first `num_chunks` chunks.

        Returns:
          The job, None when there is nothing to save or no room; and the number of chunks refused.
        """
        if num_chunks <= request.num_saved_chunks or not request.saving:
            return None, 0
        request.extend_keys(scheduled.block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        missing, num_looked_at = self._missing_chunks(request, num_chunks)
        fitting = missing[: self._staging.num_free // self._blocks_per_chunk]
        new_chunks = [NewChunk(request.keys[i], request.keys[i - 1] if i else None) for i in fitting]
        slots = self._index.allocate(new_chunks, protected=request.keys)
        self._index.touch(request.keys[:num_chunks])
        saved, refused = missing[: len(slots)], [*missing[len(slots) :], *range(num_looked_at, num_chunks)]
        request.num_saved_chunks = refused[0] if refused else num_chunks
        request.num_refused_chunks = len(refused)
        if not saved:
            return None, len(refused)
        size = self._blocks_per_chunk
        self._staging.reserve(request.account, len(saved) * size, Direction.SAVE)
        job = self._jobs.add(
            Direction.SAVE,
            block_ids=tuple(scheduled.block_ids[i * size + j] for i in saved for j in range(size)),
            host_block_ids=tuple(slot * size + j for slot in slots for j in range(size)),
            request_id=request.request_id,
            account=request.account,
            keys=tuple(request.keys[i] for i in saved),
            num_valid_tokens=0,
            deadline_s=deadline_s,
        )
        return job, len(refused)

    def rewind(self, requests: Iterable[TrackedRequest], lost: set[ChunkKey], *, failed_save: bool) -> None:
        """Offers again what is lost, for every request that counted on it. Rare; O(requests).

        After `_MAX_FAILED_SAVES` failed saves a request gives up: it would fail again in every step.
        """
        for request in requests:
            for i, key in enumerate(request.keys[: request.num_saved_chunks]):
                if key in lost:
                    request.num_saved_chunks = i
                    request.num_failed_saves += failed_save
                    request.saving &= request.num_failed_saves < _MAX_FAILED_SAVES
                    break

    def _missing_chunks(self, request: TrackedRequest, num_chunks: int) -> tuple[list[int], int]:
        """Chunks of the first `num_chunks` that the host tier does not hold, in order, and how far it looked.

        What was saved earlier may have been evicted since, from the tail on: going back to the last
        chunk that is still there closes the gap, because the request still holds those blocks too.
        """
        first = request.num_saved_chunks
        while first > 0 and self._index.state(request.keys[first - 1]) is None:
            first -= 1
        missing = []
        for i in range(first, num_chunks):
            state = self._index.state(request.keys[i])
            if state is None:
                missing.append(i)
            elif state is ChunkState.CONDEMNED:
                return missing, i  # its key is taken until its last pin is; what follows waits, or hangs on nothing
        return missing, num_chunks
