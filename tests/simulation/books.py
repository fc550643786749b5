"""What is known of loads on their way and of chunks whose loads failed: what a request may use, and try again."""

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
      slots: slot of the host tier that each block is read from.
      chunks: hash that names the chunk of each block.
      num_good: leading blocks of which nothing bad was heard.
      bad: chunks whose copies failed.
    """

    job_id: int
    slots: list[int]
    chunks: list[BlockHash | None]
    num_good: int
    bad: set[BlockHash | None] = dataclasses.field(default_factory=set)

    def fail(self, positions: Iterable[int]) -> None:
        """These blocks are not there, or may not be."""
        self.num_good = min(self.num_good, min(positions))


@final
class LoadBooks:
    """The loads of all requests.

    Args:
      block_size: tokens in a block.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._loadings: dict[str, Loading] = {}
        self._shunned: dict[str, set[BlockHash]] = {}  # chunks that a request has seen fail

    def start(self, name: str, loading: Loading) -> None:
        self._loadings[name] = loading

    def forget(self, name: str) -> None:
        """The request waits no more."""
        self._loadings.pop(name, None)

    def end(self, name: str) -> None:
        """The request is gone."""
        self.forget(name)
        self._shunned.pop(name, None)

    def reset(self) -> None:
        """What is on its way is of no use, and what failed goes by other names."""
        self._shunned.clear()
        for loading in self._loadings.values():
            loading.num_good = 0
            loading.bad.clear()
            loading.chunks = [None] * len(loading.chunks)

    def fail(self, job_id: int, positions: Collection[int]) -> None:
        """Copies of these blocks failed or were late; of none in particular means of all."""
        for loading in self._loadings.values():
            if loading.job_id == job_id:
                failed = positions or range(len(loading.slots))
                loading.fail(failed)
                loading.bad.update(loading.chunks[i] for i in failed)

    def lose_slots(self, first: int, end: int) -> None:
        """Host memory is gone."""
        for loading in self._loadings.values():
            lost = [i for i, slot in enumerate(loading.slots) if first <= slot < end]
            if lost:
                loading.fail(lost)

    def check_match(self, name: str, chunks: Iterable[BlockHash]) -> None:
        """Raises Violation if a request is promised again what failed for it and has not been loaded since."""
        if not self._shunned.get(name, set()).isdisjoint(chunks):
            raise Violation(f"{name} is promised a chunk again whose load failed for it")

    def take(self, name: str, num_tokens: int, *, finished: bool, ended: bool) -> set[BlockHash]:
        """The engine hears of the end of a load.

        Args:
          name: whose.
          num_tokens: tokens that it brought.
          finished: all of them.
          ended: the workers are through with it.
        Returns:
          Chunks whose copies failed, when the workers are through with it.
        Raises:
          Violation: it uses what failed or was lost.
        """
        loading = self._loadings.pop(name, None)
        if loading is None:  # never sent
            return set()
        good = loading.num_good * self._block_size
        if num_tokens > good or (finished and loading.num_good < len(loading.slots)):
            raise Violation(f"{name} uses {num_tokens} tokens of load {loading.job_id}; {good} of them are there")
        if finished:
            for other in self._loadings.values():  # its end may have come before, in the same report
                other.bad.difference_update(loading.chunks)
            for shunned in self._shunned.values():
                shunned.difference_update(chunk for chunk in loading.chunks if chunk is not None)
        if finished or not ended:
            return set()
        bad = {chunk for chunk in loading.bad if chunk is not None}
        self._shunned.setdefault(name, set()).update(bad)
        return bad

    def job_of(self, name: str) -> int:
        """The load that a request waits for; -1 without one."""
        return self._loadings[name].job_id if name in self._loadings else -1
