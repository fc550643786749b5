"""What tests look at inside the library's scheduler."""

from typing import TYPE_CHECKING, Any

from tpu_offload.core.policies import PriorityPolicy, Use
from tpu_offload.core.storage.policy_order import PolicyOrder

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    from tpu_offload import OffloadScheduler
    from tpu_offload.core.chunk_table import ChunkTable
    from tpu_offload.core.context import TierContext
    from tpu_offload.core.host_pools import HostPools, SegmentMoves
    from tpu_offload.core.index import ChunkIndex
    from tpu_offload.core.index.checkpoints import Checkpoint
    from tpu_offload.core.index.chunk_states import ChunkStates
    from tpu_offload.core.jobs import JobTable
    from tpu_offload.core.load_queue import LoadQueue
    from tpu_offload.core.loading import LoadPlanner
    from tpu_offload.core.request_table import RequestTable
    from tpu_offload.core.saving import SavePlanner
    from tpu_offload.core.storage.lookups import LookupPlanner
    from tpu_offload.core.storage.planner import StoragePlanner
    from tpu_offload.core.storage.stack import StorageStackPlanner
    from tpu_offload.core.swap.manager import RequestSwap
    from tpu_offload.core.swap.swapped_request import SwappedRequest
    from tpu_offload.core.workers import Workers
    from tpu_offload.types import BlockHash, ChunkKey


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


def expected_chunks(planner: "StoragePlanner") -> "set[ChunkKey]":
    """The chunks that a storage tier will get when the host tier evicts them, as its eviction policy knows them."""
    order = planner.records._order
    return order.expected() if isinstance(order, PolicyOrder) else set()


def lookup_planner(planner: "StoragePlanner") -> "LookupPlanner":
    """What is asked of a shared storage tier."""
    return planner.lookups


def asks_again(planner: "StoragePlanner", job_id: int) -> bool:
    """Whether this lookup in flight asks for what is known already, to confirm it."""
    return planner.lookups._confirming == job_id


def forget_confirmations(planner: "StoragePlanner") -> None:
    """Nothing that counts as stored in a shared tier is confirmed any more, as after a long time."""
    planner.confirmations._recent, planner.confirmations._before = set(), set()


def write_candidates(planner: "StoragePlanner") -> "dict[ChunkKey, Use]":
    """The chunks of the host tier that are to be written to a storage tier, in order."""
    return planner.writes._candidates


def swapped_requests(swap: "RequestSwap") -> "dict[str, SwappedRequest]":
    """The requests that are swapped out."""
    return swap._swapped


def swap_pool_hashes(scheduler: "OffloadScheduler") -> "dict[int, BlockHash]":
    """The blocks of the swap pool that can be found, and their hashes; the pool's own table."""
    return tier_context(scheduler).swap_pool._hash_of
