"""What tests look at inside the default eviction policy."""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    from tpu_offload.core.policies.density import DensityPolicy
    from tpu_offload.core.policies.lifetimes import Lifetimes
    from tpu_offload.core.policies.run_keys import RunTable
    from tpu_offload.core.policies.runs import RunQueues


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
