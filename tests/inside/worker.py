"""What tests look at inside a worker."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    import jax

    from tpu_offload import OffloadWorker
    from tpu_offload.memory import HostArena
    from tpu_offload.memory.host_arena import Segment
    from tpu_offload.storage import StorageTier
    from tpu_offload.types import StepReport
    from tpu_offload.worker.jobs import WorkerJobs
    from tpu_offload.worker.page_group_copies import PageGroupCopies
    from tpu_offload.worker.staging import StagingUsage
    from tpu_offload.worker.storage.io import StorageCopies
    from tpu_offload.worker.storage.record_io import StorageRecords
    from tpu_offload.worker.storage.slots import SlotPool
    from tpu_offload.worker.storage.stack import StorageStack
    from tpu_offload.worker.tier_copies import TierCopies


def host_tier(worker: "OffloadWorker") -> "TierCopies":
    """The copies to and from the host tier."""
    assert worker._tier is not None
    return worker._tier


def tier_groups(worker: "OffloadWorker") -> "list[PageGroupCopies]":
    """The host tier's copies, by page group."""
    return host_tier(worker)._groups


def tier_group(worker: "OffloadWorker") -> "PageGroupCopies":
    """The host tier's copies of the one page group."""
    (group,) = tier_groups(worker)
    return group


def staging_usage(worker: "OffloadWorker") -> "StagingUsage":
    """The staging blocks that a worker's copies take."""
    return host_tier(worker)._staging


def set_lockstep(worker: "OffloadWorker", is_lockstep: bool) -> None:
    """Whether copies of the host tier end as on hosts that share a model."""
    parts: list[Any] = [host_tier(worker), staging_usage(worker), *tier_groups(worker)]
    for part in parts:
        part._lockstep = is_lockstep


def swap_groups(worker: "OffloadWorker") -> "list[PageGroupCopies]":
    """The swap pool's copies, by page group."""
    assert worker._swap is not None
    return worker._swap._groups


def worker_jobs(worker: "OffloadWorker") -> "WorkerJobs":
    """The jobs that a worker has begun and not reported."""
    return worker._jobs


def last_report(worker: "OffloadWorker") -> "StepReport":
    """What a worker has reported last, without results: as if nothing had ended since."""
    return worker._make_report(worker._reported)


def worker_storage(worker: "OffloadWorker") -> "StorageStack | None":
    """A worker's storage tiers; None without any."""
    return worker._storage


def storage_copies(worker: "OffloadWorker", number: int = 0) -> "StorageCopies":
    """The copies to and from one storage tier, of the first rank; the nearest tier is 0."""
    stack = worker_storage(worker)
    assert stack is not None
    return stack.tiers[number]


def storage_calls(copies: "StorageCopies") -> "StorageRecords":
    """The reads and writes of a storage tier, which its threads make."""
    return copies._io


def worker_storage_tier(worker: "OffloadWorker", number: int = 0) -> "StorageTier":
    """One of a worker's storage tiers, of the first rank; the nearest is 0."""
    return storage_calls(storage_copies(worker, number)).tier


def slot_pools(worker: "OffloadWorker") -> "list[SlotPool]":
    """The slots of the host tier that storage tiers read and write, by pool; of a worker with one rank."""
    stack = worker_storage(worker)
    assert stack is not None
    (pools,) = stack._pools.values()
    return pools


def arena_segments(arena: "HostArena") -> "list[Segment]":
    """Per segment that is allocated, its arrays; the arena's own list."""
    return arena._segments


def lost_segments(arena: "HostArena") -> "set[int]":
    """Segments whose memory was lost and is not in use again."""
    return arena._lost


def hold_loads(copies: "PageGroupCopies") -> Callable[[], None]:
    """Has staged loads never arrive, until what is returned is called."""
    resume, copies._resume_load = copies._resume_load, lambda flight, kv_caches: None

    def release() -> None:
        copies._resume_load = resume

    return release


def change_ranks(copies: "PageGroupCopies", change: Callable[[Any], Any]) -> None:
    """Has blocks copied to and from other ranks than their own, which are given to `change`."""
    ranks_of = copies._ranks_of
    copies._ranks_of = lambda parts: change(ranks_of(parts))


def rebuilt_segments(arena: "HostArena") -> "dict[int, Segment]":
    """Lost segments that are allocated again and not in use yet; the arena's own table."""
    return arena._rebuilt


def segment_structs(arena: "HostArena") -> "tuple[jax.ShapeDtypeStruct, ...]":
    """The stripes of a segment."""
    return arena._structs
