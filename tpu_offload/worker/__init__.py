"""The worker: owns the host pool of one process, and copies."""

from tpu_offload.worker.ranks import RankPlans
from tpu_offload.worker.worker import OffloadWorker

__all__ = ["OffloadWorker", "RankPlans"]
