"""What tests look at inside a worker."""

from tpu_offload.worker import OffloadWorker
from tpu_offload.worker.group_copies import GroupCopies


def tier_group(worker: OffloadWorker) -> GroupCopies:
    """The host tier's copies of the one layer group."""
    assert worker._tier is not None
    (group,) = worker._tier._groups
    return group
