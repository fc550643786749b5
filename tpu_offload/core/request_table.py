"""The requests that the scheduler tracks, and the namespace of their chunk keys."""

import secrets
from collections.abc import Callable, Iterable
from typing import final

from tpu_offload import hashing
from tpu_offload.core.engine_api import RequestLimits
from tpu_offload.core.policies import Use
from tpu_offload.core.request_state import RequestState
from tpu_offload.layout import KVLayout


def _draw_epoch() -> int:
    return secrets.randbits(63) + 1


@final
class KeySpace:
    """The suffix of all chunk keys. Each reset changes it, so that no earlier entry is found.

    Before the first reset it is the same in all processes with this layout, so that stored chunks are found again.
    After one, the model may be another than the layout says, so no other process has the same.

    Args:
      layout: what a block is made of.
      blocks_per_chunk: blocks in a chunk.

    Attributes:
      draw_epoch: returns a random number from 1 to 2**63, for a reset. Tests that repeat a run draw it from its seed.
    """

    def __init__(self, layout: KVLayout, *, blocks_per_chunk: int) -> None:
        self._fingerprint = layout.fingerprint()
        self._blocks_per_chunk = blocks_per_chunk
        self._epoch = 0
        self.draw_epoch: Callable[[], int] = _draw_epoch
        self.namespace = self._make()

    def reset(self) -> None:
        """Changes the namespace."""
        self._epoch = self.draw_epoch()
        self.namespace = self._make()

    def _make(self) -> bytes:
        return hashing.key_namespace(self._fingerprint, blocks_per_chunk=self._blocks_per_chunk, epoch=self._epoch)


@final
class RequestTable:
    """The tracked requests, by id, from the first match until they finish or are preempted.

    It has a dict rather than being one: compiled, a subclass of dict has its methods looked up by name at each call.

    A request's own limits outlive its entry: it may be preempted and matched again.

    Args:
      keys: the namespace of new requests.
      limits: those of the settings.
    """

    def __init__(self, keys: KeySpace, limits: RequestLimits) -> None:
        self._keys = keys
        self._default_limits = limits
        self._tracked: dict[str, RequestState] = {}
        self._limits: dict[str, RequestLimits] = {}  # of unfinished requests that came with some
        self._num_created = 0

    def __len__(self) -> int:
        return len(self._tracked)

    def __getitem__(self, request_id: str) -> RequestState:
        return self._tracked[request_id]

    def get(self, request_id: str) -> RequestState | None:
        """The tracked request of this id; None if there is none."""
        return self._tracked.get(request_id)

    def get_or_new(self, request_id: str) -> RequestState:
        """The tracked request of this id, or a new one, which the caller adds once its input is validated."""
        request = self._tracked.get(request_id)
        return self.new(request_id) if request is None else request

    def all(self) -> Iterable[RequestState]:
        """All tracked requests, in the order in which they were added."""
        return self._tracked.values()

    def add(self, request: RequestState) -> None:
        """Tracks a request from now on; one that is tracked already keeps its place."""
        self._tracked[request.request_id] = request

    def remove(self, request_id: str) -> RequestState | None:
        """Tracks a request no longer, and returns it; None if it was not tracked."""
        return self._tracked.pop(request_id, None)

    def new(self, request_id: str) -> RequestState:
        """A request that is not tracked yet."""
        number = self._num_created
        self._num_created += 1
        request = RequestState(
            request_id, account=f"{request_id}#{number}", use=Use(number), namespace=self._keys.namespace
        )
        request.limit(self._limits.get(request_id, self._default_limits))
        return request

    def within_defaults(self, limits: RequestLimits) -> RequestLimits:
        """Limits of one request, with the token limits no higher than those of the settings."""
        return limits.within(self._default_limits)

    def set_limits(self, request_id: str, limits: RequestLimits) -> None:
        """Limits of a request until it finishes."""
        self._limits[request_id] = limits

    def forget_limits(self, request_id: str) -> None:
        """The request has finished."""
        self._limits.pop(request_id, None)
