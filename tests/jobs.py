"""Jobs as a scheduler would plan them, for tests that make plans by hand."""

import dataclasses
from collections.abc import Iterable

from tpu_offload.types import ChunkKey, CopyJob, CopyPart, JobKind


def copy_job(
    job_id: int,
    kind: JobKind,
    block_ids: Iterable[int],
    host_block_ids: Iterable[int],
    *,
    group_id: int = 0,
    request_id: str = "",
    num_staging_blocks: int = 0,
) -> CopyJob:
    """A job of one part in the host tier."""
    part = CopyPart(group_id=group_id, block_ids=tuple(block_ids), host_block_ids=tuple(host_block_ids))
    return CopyJob(
        job_id=job_id, kind=kind, parts=(part,), request_id=request_id, num_staging_blocks=num_staging_blocks
    )


def key_of(name: int) -> ChunkKey:
    """The key of a chunk that a test names by a number."""
    return ChunkKey(bytes([name]) * 16 + b"key")


def storage_job(
    job_id: int, kind: JobKind, chunks: Iterable[tuple[int, int]], *, deleted: Iterable[int] = ()
) -> CopyJob:
    """A cascade or promotion of chunks (name, slot)."""
    return CopyJob(
        job_id=job_id,
        kind=kind,
        chunks=tuple((key_of(name), slot) for name, slot in chunks),
        deleted_keys=tuple(key_of(name) for name in deleted),
    )


def as_early(job: CopyJob) -> CopyJob:
    """The same save, of blocks that are others' from its step on."""
    return dataclasses.replace(job, kind=JobKind.EARLY_SAVE)


def host_block_ids(job: CopyJob) -> tuple[int, ...]:
    """Block positions in host memory of all parts, in the order of `CopyJob.block_ids`."""
    return tuple(position for part in job.parts for position in part.host_block_ids)
