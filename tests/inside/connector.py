"""What tests look at inside the connector for vLLM."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    from tpu_offload import OffloadScheduler
    from tpu_offload.adapters.vllm.event_sources import BlockSources
    from tpu_offload.adapters.vllm.load_timing import LoadTiming
    from tpu_offload.adapters.vllm.scheduler_side import SchedulerSide
    from tpu_offload.adapters.vllm.tainted_requests import TaintedRequests
    from tpu_offload.adapters.vllm.worker_side import WorkerSide


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
