"""A router's view from vLLM's KV events: all blocks, and those in the host tier."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

from tests.adapters.llmd_index import LlmdIndex

_LIMIT_S = 60.0


class KVTree:
    """Listens to the events of one server.

    Args:
      path: the Unix socket that the server publishes on.
      block_size: tokens of a block.

    Attributes:
      host: hashes of the blocks in the host tier: those stored and not removed.
      num_removed: blocks removed from the host tier.
      llmd: what llm-d's router would know.
      llmd_host: what it would know of the host tier from the events for the host tier alone.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.connect(f"ipc://{path}")
        self._socket.subscribe("")
        self._block_size = block_size
        self._hashes: dict[tuple[object, tuple[int, ...]], object] = {}  # of a block's parent and its tokens
        self._next: int | None = None
        self.host: set[object] = set()
        self.num_removed = 0
        self.llmd, self.llmd_host = LlmdIndex(block_size), LlmdIndex(block_size, tiers=["cpu"])

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(0)
        self._context.term()

    def wait_for_subscription(self, cause_events: Callable[[], object]) -> None:
        """Causes events until one arrives: a publisher takes a while to notice a new subscriber."""
        end_s = time.monotonic() + _LIMIT_S
        while self._next is None:
            assert time.monotonic() < end_s, "no event arrived"
            cause_events()
            self._follow(0.2)

    def follow_until(self, done: Callable[[], bool]) -> None:
        """Processes events until `done` returns True."""
        end_s = time.monotonic() + _LIMIT_S
        self._follow(0.2)
        while not done():
            assert time.monotonic() < end_s, f"by the events, {len(self.host)} blocks are stored"
            self._follow(0.2)

    def num_host_tokens(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that the host tier has."""
        parent, size = None, self._block_size
        for start in range(0, len(tokens) - size + 1, size):
            parent = self._hashes.get((parent, tuple(tokens[start : start + size])))
            if parent is None or parent not in self.host:
                return start
        return len(tokens) // size * size

    def _follow(self, wait_s: float) -> None:
        while self._socket.poll(int(1000 * wait_s)):
            _, number, payload = self._socket.recv_multipart()
            found = int.from_bytes(number, "big")
            assert self._next in (None, found), f"batches from {self._next} on were lost, got {found}"
            self._next = found + 1
            self.llmd.take(payload)
            self.llmd_host.take(payload)
            for event in self._decode(payload).events:
                self._take(event)

    def _take(self, event: KVCacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.host.clear()
        elif isinstance(event, BlockStored) and event.medium == MEDIUM_CPU:
            assert self.host.isdisjoint(event.block_hashes), "stored twice"
            self.host.update(event.block_hashes)
            self._learn(event)
        elif isinstance(event, BlockStored):
            self._learn(event)
        elif isinstance(event, BlockRemoved) and event.medium == MEDIUM_CPU:
            assert self.host.issuperset(event.block_hashes), "removed without having been stored"
            self.host.difference_update(event.block_hashes)
            self.num_removed += len(event.block_hashes)

    def _learn(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            assert len(tokens) == self._block_size
            known = self._hashes.setdefault((parent, tokens), block_hash)
            assert known == block_hash, "the tokens and the parent of a block in HBM and of one in the host tier differ"
            parent = block_hash
