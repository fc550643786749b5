"""The values of settings that are a choice."""

import enum


class CopyPath(enum.Enum):
    """How blocks move between HBM and the host pool, in one direction (see `tpu_offload.kernels`)."""

    DIRECT = "direct"
    STAGED = "staged"
    FUSED = "fused"  # inside the engine's own step; only if the engine supports it
    AUTO = "auto"  # the fastest of the others according to the copy profile; resolved by the worker

    @property
    def stages(self) -> bool:
        """Whether a copy holds a staging block of HBM for each block in flight.

        Fused copies do not: they are limited by the compiled step sizes, and the remainder uses the direct path. `auto`
        counts as staged, the path with the largest demand, until the worker has reported which path it chose.
        """
        return self in (CopyPath.STAGED, CopyPath.AUTO)


class SwapMode(enum.Enum):
    """How a preempted request gets its KV back."""

    AUTO = "auto"  # the faster of the two, by measured rates
    SWAP = "swap"  # swapped out and in, if it fits the pool
    RECOMPUTE = "recompute"  # dropped and computed again


class LoadMode(enum.Enum):
    """Whether a request loads KV that was found, or computes it again (see `tpu_offload.core.load_costs`)."""

    AUTO = "auto"  # the faster of the two, by measured times
    LOAD = "load"
    RECOMPUTE = "recompute"


class SaveEvent(enum.Enum):
    """When KV is saved (see `tpu_offload.core.save_policy`)."""

    COMPUTE = "compute"  # in the step that computes it: write-through
    HBM_EVICTION = "eviction"  # when HBM is about to evict it
    PREEMPTION = "preemption"  # when its request is preempted and will return


class StorageWriteEvent(enum.Enum):
    """When chunks are written to the storage tier (see `tpu_offload.core.storage.planner`)."""

    SAVE = "save"  # once they are in the host tier: cascade
    HOST_EVICTION = "eviction"  # when the host tier evicts them: demotion


class StorageAdmission(enum.Enum):
    """Which chunks the storage tier takes (see `tpu_offload.core.storage.admission`)."""

    ALL = "all"
    SECOND_SIGHTING = "second_sighting"  # those that at least two requests contained
    AFTER_HIT = "after_hit"  # those that a request loaded from the host tier


class StorageCopyPath(enum.Enum):
    """How chunks move between the host pool and the buffers of storage (see `tpu_offload.kernels.payload_paths`)."""

    AUTO = "auto"  # the fastest of the others on this machine; resolved by the worker
    HOST = "host"  # a call of the host's CPU in the device's queue
    HBM = "hbm"  # through HBM, by DMA


class EvictionPolicyName(enum.Enum):
    """Which chunk a full host tier evicts (see `tpu_offload.core.policies`)."""

    DENSITY = "density"
    LRU = "lru"
    ARC = "arc"
    S3FIFO = "s3fifo"
    WTINYLFU = "wtinylfu"


DEFAULT_EVICTION_POLICY = EvictionPolicyName.DENSITY


class StorageEvictionPolicy(enum.Enum):
    """Which chunk a full storage tier evicts (see `tpu_offload.core.storage.order_choice`)."""

    AUTO = "auto"  # by the size of the tier: density in large ones, else lru or the better of the two
    DENSITY = "density"
    LRU = "lru"
    ARC = "arc"
    S3FIFO = "s3fifo"
    WTINYLFU = "wtinylfu"
