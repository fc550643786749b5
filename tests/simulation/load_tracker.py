"""Tracks loads in flight and chunks whose loads failed: what a request may use and retry."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import final

from tests.simulation.memory import Violation
from tpu_offload import BlockHash


@dataclasses.dataclass(slots=True, eq=False)
class Loading:
    """A load that a request waits for.

    Attributes:
      job_id: the job.
      slots: for each block, the slot of the host tier that it is read from.
      chunks: for each block, the hash of its chunk; None in layer groups after the first.
      num_blocks: blocks of the first layer group, which come first.
      is_whole: whether one failed block makes all of it useless.
      num_good: leading blocks without a reported failure.
      bad: chunks whose copies failed.
    """

    job_id: int
    slots: list[int]
    chunks: list[BlockHash | None]
    num_blocks: int
    is_whole: bool
    num_good: int = dataclasses.field(init=False)
    bad: set[BlockHash | None] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.num_good = self.num_blocks

    def fail(self, positions: Iterable[int]) -> None:
        """Marks blocks as not, or possibly not, loaded."""
        self.num_good = min(self.num_good, 0 if self.is_whole else min(positions))


@final
class LoadTracker:
    """Tracks the loads of all requests.

    Args:
      block_size: tokens in a block.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._loadings: dict[str, Loading] = {}
        self._failed_chunks: dict[str, set[BlockHash]] = {}  # per request, chunks whose load failed for it

    def start(self, name: str, loading: Loading) -> None:
        self._loadings[name] = loading

    def cancel(self, name: str) -> None:
        """The request no longer waits for a load."""
        self._loadings.pop(name, None)

    def end_request(self, name: str) -> None:
        """The request has ended."""
        self.cancel(name)
        self._failed_chunks.pop(name, None)

    def reset(self) -> None:
        """Loads in flight become invalid, and earlier failures no longer apply: chunks have new keys."""
        self._failed_chunks.clear()
        for loading in self._loadings.values():
            loading.num_good = 0
            loading.bad.clear()
            loading.chunks = [None] * len(loading.chunks)

    def fail(self, job_id: int, positions: Collection[int]) -> None:
        """Copies of these blocks failed or timed out; no positions means all blocks."""
        for loading in self._loadings.values():
            if loading.job_id == job_id:
                failed = positions or range(len(loading.slots))
                loading.fail(failed)
                loading.bad.update(loading.chunks[i] for i in failed)

    def lose_slots(self, first: int, end: int) -> None:
        """Host memory of these slots was lost."""
        for loading in self._loadings.values():
            lost = [i for i, slot in enumerate(loading.slots) if first <= slot < end]
            if lost:
                loading.fail(lost)

    def check_match(self, name: str, chunks: Iterable[BlockHash]) -> None:
        """Raises Violation if a request is promised a chunk that failed for it and has not been loaded since."""
        if not self._failed_chunks.get(name, set()).isdisjoint(chunks):
            raise Violation(f"{name} is promised a chunk whose load failed for it before")

    def end_load(self, name: str, num_tokens: int, *, finished: bool, ended: bool) -> set[BlockHash]:
        """The engine is told that a load has ended.

        Args:
          name: the request.
          num_tokens: number of loaded tokens.
          finished: whether all tokens were loaded.
          ended: whether all workers have finished it.
        Returns:
          Chunks whose copies failed, if all workers have finished it.
        Raises:
          Violation: it uses tokens that failed or were lost.
        """
        loading = self._loadings.pop(name, None)
        if loading is None:  # it was never sent
            return set()
        good = loading.num_good * self._block_size
        if num_tokens > good or (finished and loading.num_good < loading.num_blocks):
            raise Violation(f"{name} uses {num_tokens} tokens of load {loading.job_id}; only {good} of them are valid")
        if finished:
            for other in self._loadings.values():  # one that failed earlier in the same report
                other.bad.difference_update(loading.chunks)
            for failed_chunks in self._failed_chunks.values():
                failed_chunks.difference_update(chunk for chunk in loading.chunks if chunk is not None)
        if finished or not ended:
            return set()
        bad = {chunk for chunk in loading.bad if chunk is not None}
        self._failed_chunks.setdefault(name, set()).update(bad)
        return bad

    def job_of(self, name: str) -> int:
        """The job id of the load that a request waits for; -1 without one."""
        return self._loadings[name].job_id if name in self._loadings else -1
