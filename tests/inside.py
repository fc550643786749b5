"""What tests look at inside a worker and a scheduler."""

from tpu_offload import OffloadScheduler
from tpu_offload.core.storage.planner import StoragePlanner
from tpu_offload.engine import Engine
from tpu_offload.storage import StorageTier
from tpu_offload.worker import OffloadWorker
from tpu_offload.worker.page_group_copies import PageGroupCopies


def tier_groups(worker: OffloadWorker) -> list[PageGroupCopies]:
    """The host tier's copies, by page group."""
    assert worker._tier is not None
    return worker._tier._groups


def tier_group(worker: OffloadWorker) -> PageGroupCopies:
    """The host tier's copies of the one page group."""
    (group,) = tier_groups(worker)
    return group


def one_worker(engine: Engine) -> OffloadWorker:
    """The worker of an engine on one host."""
    assert engine._offload is not None
    assert isinstance(engine._offload._worker, OffloadWorker)
    return engine._offload._worker


def storage_tier(engine: Engine) -> StorageTier:
    """The storage tier of an engine on one host."""
    storage = one_worker(engine)._storage
    assert storage is not None
    return storage.tiers[0]._io.tier


def storage_planners(scheduler: OffloadScheduler) -> tuple[StoragePlanner, ...]:
    """What a scheduler plans for each storage tier, nearest first."""
    return tuple(scheduler._storage.tiers)


def storage_planner(scheduler: OffloadScheduler) -> StoragePlanner:
    """What a scheduler plans for the nearest storage tier."""
    return storage_planners(scheduler)[0]
