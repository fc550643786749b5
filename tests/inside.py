"""What tests look at inside a worker, a scheduler and the embedded engine.

A private attribute that tests of several modules need is named here only.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from tpu_offload.core.policies import PriorityPolicy

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    import socket

    import jax
    from glide_sync import GlideClient

    from tpu_offload import OffloadScheduler, OffloadWorker
    from tpu_offload.adapters.vllm.event_sources import BlockSources
    from tpu_offload.adapters.vllm.load_timing import LoadTiming
    from tpu_offload.adapters.vllm.scheduler_side import SchedulerSide
    from tpu_offload.adapters.vllm.tainted_requests import TaintedRequests
    from tpu_offload.adapters.vllm.worker_side import WorkerSide
    from tpu_offload.core.chunk_table import ChunkTable
    from tpu_offload.core.context import TierContext
    from tpu_offload.core.host_pools import HostPools, SegmentMoves
    from tpu_offload.core.index import ChunkIndex
    from tpu_offload.core.index.checkpoints import Checkpoint
    from tpu_offload.core.index.chunk_states import ChunkStates
    from tpu_offload.core.jobs import JobTable
    from tpu_offload.core.load_queue import LoadQueue
    from tpu_offload.core.loading import LoadPlanner
    from tpu_offload.core.policies.density import DensityPolicy
    from tpu_offload.core.policies.lifetimes import Lifetimes
    from tpu_offload.core.policies.run_keys import RunTable
    from tpu_offload.core.policies.runs import RunQueues
    from tpu_offload.core.request_table import RequestTable
    from tpu_offload.core.saving import SavePlanner
    from tpu_offload.core.storage.lookups import LookupPlanner
    from tpu_offload.core.storage.planner import StoragePlanner
    from tpu_offload.core.storage.stack import StorageStackPlanner
    from tpu_offload.core.swap.manager import RequestSwap
    from tpu_offload.core.swap.swapped_request import SwappedRequest
    from tpu_offload.core.workers import Workers
    from tpu_offload.engine import Engine
    from tpu_offload.engine.block_manager import BlockManager
    from tpu_offload.engine.kv_blocks import KVBlocks
    from tpu_offload.engine.offloading import Offloading
    from tpu_offload.engine.runner import ModelRunner
    from tpu_offload.engine.scheduler import Scheduler
    from tpu_offload.engine.sequence import Sequence
    from tpu_offload.engine.state_rows import StateRows
    from tpu_offload.memory import HostArena
    from tpu_offload.memory.host_arena import Segment
    from tpu_offload.storage import StorageTier
    from tpu_offload.storage.resp_connection import Connection
    from tpu_offload.storage.valkey import ValkeyTier
    from tpu_offload.storage.valkey_records import RecordConnections
    from tpu_offload.types import BlockHash, ChunkKey, StepReport
    from tpu_offload.worker.jobs import WorkerJobs
    from tpu_offload.worker.page_group_copies import PageGroupCopies
    from tpu_offload.worker.staging import StagingUsage
    from tpu_offload.worker.storage.io import StorageCopies
    from tpu_offload.worker.storage.record_io import StorageRecords
    from tpu_offload.worker.storage.slots import SlotPool
    from tpu_offload.worker.storage.stack import StorageStack
    from tpu_offload.worker.tier_copies import TierCopies

# The worker.


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


# The scheduler.


def tier_context(scheduler: "OffloadScheduler") -> "TierContext":
    """What the parts of a scheduler share."""
    return scheduler._context


def current_namespace(scheduler: "OffloadScheduler") -> bytes:
    """What the keys of all chunks end with since the last reset."""
    return tier_context(scheduler).keys.namespace


def chunk_index(scheduler: "OffloadScheduler") -> "ChunkIndex":
    """What is in the host tier."""
    return tier_context(scheduler).index


def slots_in(index: "ChunkIndex") -> "ChunkTable[int]":
    """The slot of each chunk in an index, READY or not; the index's own table."""
    return index._tree.slot_of


def slot_of_chunk(scheduler: "OffloadScheduler") -> "ChunkTable[int]":
    """The slot of each chunk in the host tier, READY or not; the index's own table."""
    return slots_in(chunk_index(scheduler))


def chunk_states(scheduler: "OffloadScheduler") -> "ChunkStates":
    """Which chunks of the host tier are pinned or not READY."""
    return chunk_index(scheduler)._states


def checkpoint_table(scheduler: "OffloadScheduler") -> "dict[ChunkKey, Checkpoint]":
    """The checkpoints in the host tier, oldest first; the index's own table."""
    return chunk_index(scheduler).checkpoints._table


def eviction_policy(scheduler: "OffloadScheduler") -> PriorityPolicy:
    """The eviction policy of the host tier, over those of each priority."""
    policy = chunk_index(scheduler)._policy
    assert isinstance(policy, PriorityPolicy)
    return policy


def job_table(scheduler: "OffloadScheduler") -> "JobTable":
    """The jobs in flight, and those that the coming plan has."""
    return tier_context(scheduler).jobs


def request_table(scheduler: "OffloadScheduler") -> "RequestTable":
    """What a scheduler knows of each request."""
    return tier_context(scheduler).requests


def workers_of(scheduler: "OffloadScheduler") -> "Workers":
    """The workers as a scheduler knows them."""
    return scheduler._workers


def load_queue(scheduler: "OffloadScheduler") -> "LoadQueue":
    """The loads that wait for a plan."""
    return scheduler._queue


def load_planner(scheduler: "OffloadScheduler") -> "LoadPlanner":
    """The part of a scheduler that plans loads."""
    return scheduler._loads


def save_planner(scheduler: "OffloadScheduler") -> "SavePlanner":
    """The part of a scheduler that plans saves."""
    return scheduler._saves


def host_pools(scheduler: "OffloadScheduler") -> "HostPools":
    """The sizes of the host tier's pools, as the workers report them."""
    return scheduler._pools


def segment_moves(scheduler: "OffloadScheduler") -> "SegmentMoves | None":
    """Moves of host memory between the pools of chunks and states; None without states."""
    return host_pools(scheduler)._moves


def set_pool_balance(scheduler: "OffloadScheduler", balance: Any) -> None:
    """Has another rule decide when memory moves between the pools of chunks and states."""
    moves = segment_moves(scheduler)
    assert moves is not None
    moves._balance = balance


def storage_stack_planner(scheduler: "OffloadScheduler") -> "StorageStackPlanner":
    """What a scheduler plans for all storage tiers."""
    return scheduler._storage


def storage_planners(scheduler: "OffloadScheduler") -> "tuple[StoragePlanner, ...]":
    """What a scheduler plans for each storage tier, nearest first."""
    return tuple(storage_stack_planner(scheduler).tiers)


def storage_planner(scheduler: "OffloadScheduler") -> "StoragePlanner":
    """What a scheduler plans for the nearest storage tier."""
    return storage_planners(scheduler)[0]


def lookup_planner(planner: "StoragePlanner") -> "LookupPlanner":
    """What is asked of a shared storage tier."""
    return planner._lookups


def write_candidates(planner: "StoragePlanner") -> "dict[ChunkKey, None]":
    """The chunks of the host tier that are to be written to a storage tier, in order."""
    return planner.writes._candidates


def swapped_requests(swap: "RequestSwap") -> "dict[str, SwappedRequest]":
    """The requests that are swapped out."""
    return swap._swapped


def swap_pool_hashes(scheduler: "OffloadScheduler") -> "dict[int, BlockHash]":
    """The blocks of the swap pool that can be found, and their hashes; the pool's own table."""
    return tier_context(scheduler).swap_pool._hash_of


# The connector for vLLM.


def connector_scheduler(side: "SchedulerSide") -> "OffloadScheduler | None":
    """The library's scheduler; None until the workers have reported the layout."""
    return side._offload


def promised_requests(side: "SchedulerSide") -> set[str]:
    """Requests that were matched in this pass and not admitted yet."""
    return side._promised


def event_sources(side: "SchedulerSide") -> "BlockSources | None":
    """The blocks of requests whose chunks may be stored; None without events."""
    return side._event_sources


def load_timing(side: "SchedulerSide") -> "LoadTiming":
    """What decides when loads run."""
    return side._load_timing


def tainted_requests(side: "SchedulerSide") -> "TaintedRequests":
    """The requests with other tokens than vLLM has."""
    return side._tainted


def open_loads(side: "WorkerSide") -> set[int]:
    """Loads of which vLLM or the library's scheduler does not know the end."""
    return side._unreported_loads.keys() | side._reported_loads.keys() | side._background_job_ids


def invalid_block_ids(side: "WorkerSide") -> set[int]:
    """The blocks that are to be reported to vLLM as invalid."""
    return side._invalid_block_ids


# The default eviction policy.


def run_table(policy: "DensityPolicy") -> "RunTable":
    """The runs of all chunks that a policy knows, resident or not."""
    return policy._runs


def run_queues(policy: "DensityPolicy") -> "RunQueues":
    """The queues in which runs await eviction."""
    return policy._queues


def lifetimes_of(policy: "DensityPolicy") -> "Lifetimes":
    """What a policy has learned of the time to the next use."""
    return run_queues(policy).lifetimes


def tracked_runs(policy: "DensityPolicy") -> "Collection[tuple[int, int]]":
    """Runs with evicted chunks, as number and lifetime; stale entries too."""
    return policy._tracked


def prompt_ends(policy: "DensityPolicy") -> "Collection[tuple[int, int]]":
    """Runs that end with the last chunk of a prompt, as number and ticket; stale entries too."""
    return policy._ends


# The embedded engine.


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


# Servers below a storage tier.


def asker(tier: "ValkeyTier") -> "GlideClient":
    """The client with which a tier asks the server for keys."""
    return tier._askers  # type: ignore[return-value]  # no cluster


def server_key(tier: "ValkeyTier", key: bytes) -> bytes:
    """What a record is called on the server."""
    return tier._prefix() + key


def generation(tier: "ValkeyTier") -> str:
    """The generation of records that a tier reads and writes."""
    return tier._generation


def record_connections(tier: "ValkeyTier") -> Any:
    """What carries records to the server and back."""
    return tier._records


def idle(connections: "RecordConnections") -> "list[Connection]":
    """Connections that nobody uses; the last one was used last."""
    return connections._idle


def in_use(connections: "RecordConnections") -> "Collection[Connection]":
    """Connections on which a value is read or written."""
    return connections._in_use


def set_timeout(connections: "RecordConnections", timeout_s: float) -> None:
    """The timeout from now on. What has to succeed gets a generous one, however busy the machine is."""
    connections._server = dataclasses.replace(connections._server, timeout_s=timeout_s)


def socket_of(connection: "Connection") -> "socket.socket":
    """The socket of a connection."""
    return connection._socket
