"""What tests look at inside the embedded engine."""

from typing import TYPE_CHECKING, Any

from tests.inside.worker import worker_storage_tier

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    from tpu_offload import OffloadScheduler, OffloadWorker
    from tpu_offload.engine import Engine
    from tpu_offload.engine.block_manager import BlockManager
    from tpu_offload.engine.kv_blocks import KVBlocks
    from tpu_offload.engine.offloading import Offloading
    from tpu_offload.engine.runner import ModelRunner
    from tpu_offload.engine.scheduler import Scheduler
    from tpu_offload.engine.sequence import Sequence
    from tpu_offload.engine.state_rows import StateRows
    from tpu_offload.storage import StorageTier


def offloading(engine: "Engine") -> "Offloading":
    """The glue between an engine and the library."""
    assert engine._offload is not None
    return engine._offload


def offload_scheduler(engine: "Engine") -> "OffloadScheduler":
    """The library's scheduler in an engine."""
    return offloading(engine)._scheduler


def one_worker(engine: "Engine") -> "OffloadWorker":
    """The worker of an engine on one host."""
    from tpu_offload import OffloadWorker  # imports jax

    worker = offloading(engine)._worker
    assert isinstance(worker, OffloadWorker)
    return worker


def storage_tier(engine: "Engine") -> "StorageTier":
    """The storage tier of an engine on one host."""
    return worker_storage_tier(one_worker(engine))


def model_runner(engine: "Engine") -> "ModelRunner":
    """The model and the caches of an engine on one host."""
    from tpu_offload.engine.runner import ModelRunner  # imports jax

    assert isinstance(engine._runner, ModelRunner)
    return engine._runner


def set_weights(engine: "Engine", weights: Any) -> None:
    """Gives an engine's model other weights."""
    model_runner(engine)._weights = weights


def launch_empty_batch(engine: "Engine") -> None:
    """Begins the planned copies of an engine, in a step without tokens."""
    engine._launch([])


def engine_scheduler(engine: "Engine") -> "Scheduler":
    """An engine's own scheduler."""
    return engine._scheduler


def active_sequences(scheduler: "Scheduler") -> "list[Sequence]":
    """The sequences that hold blocks, oldest first; the scheduler's own list."""
    return scheduler._active


def waiting_sequences(scheduler: "Scheduler") -> "list[Sequence]":
    """The sequences that wait for blocks, oldest first; the scheduler's own list."""
    return scheduler._waiting


def preempt_sequence(scheduler: "Scheduler", sequence: "Sequence") -> None:
    """Preempts a sequence, as if there were too few blocks."""
    scheduler._preempt(sequence)


def kv_blocks(scheduler: "Scheduler") -> "KVBlocks":
    """The blocks of an engine's caches."""
    return scheduler._blocks


def block_manager(blocks: "KVBlocks") -> "BlockManager":
    """The reference counts and the prefix cache of blocks."""
    return blocks._manager


def state_rows(blocks: "KVBlocks") -> "StateRows | None":
    """The rows of states beside the blocks; None without any."""
    return blocks._states


def row_manager(states: "StateRows") -> "BlockManager":
    """The reference counts and the prefix cache of rows of states."""
    return states._manager
