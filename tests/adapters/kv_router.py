"""A router that knows vLLM's blocks by its KV events only, of every KV cache group."""

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored

type AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared
_FULL, _WINDOW, _STATE = "full_attention", "sliding_window", "mamba"
_decode = msgspec.json.Decoder(AnyEvent).decode


class KVRouter:
    """Follows the events of one engine, and computes how much of a prompt its host tier has.

    Attributes:
      host: per KV cache group, the hashes that the host tier has.
      groups: per KV cache group, its kind and its window, as the first event of it says.
      num_removed: how many hashes were removed from the host tier.
    """

    def __init__(self) -> None:
        self.host: dict[int | None, set[Any]] = {}
        self.groups: dict[int | None, tuple[str | None, int | None]] = {}
        self.num_removed = 0
        self._hashes: dict[tuple[Any, tuple[int, ...]], Any] = {}  # of a block's parent and its tokens
        self._told: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # the inverse
        self._block_size = self._chunk_tokens = 0

    def take_json(self, events: Sequence[str], *, cleared: bool) -> None:
        """Follows events as JSON; without `cleared` not those after which nothing is there, as of HBM alone."""
        for event in map(_decode, events):
            if cleared or not isinstance(event, AllBlocksCleared):
                self.take(event)

    def take(self, event: AnyEvent) -> None:
        """Follows one event."""
        if isinstance(event, AllBlocksCleared):
            self.host.clear()
        elif isinstance(event, BlockStored):
            spec = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            assert self.groups.setdefault(event.group_idx, spec) == spec, "a group in HBM differs from that in the host"
            if event.medium == MEDIUM_CPU:
                known = self.host.setdefault(event.group_idx, set())
                assert known.isdisjoint(event.block_hashes), f"group {event.group_idx}: stored twice"
                known.update(event.block_hashes)
                self._chunk_tokens = event.block_size
                self._check(event)
            else:
                self._learn(event)
        elif isinstance(event, BlockRemoved) and event.medium == MEDIUM_CPU:
            known = self.host.get(event.group_idx, set())
            assert known.issuperset(event.block_hashes), f"group {event.group_idx}: removed, and was not stored"
            known.difference_update(event.block_hashes)
            self.num_removed += len(event.block_hashes)

    def _check(self, event: BlockStored) -> None:
        """What the host tier says of a chunk is what HBM has said of its blocks, as far as it has."""
        before, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes), "a chunk without its tokens"
        for i, block_hash in enumerate(event.block_hashes):
            found = block_hash
            for end in range((i + 1) * size, i * size, -(self._block_size or size)):
                if found not in self._told:
                    break
                found, tokens = self._told[found]
                assert tuple(event.token_ids[end - len(tokens) : end]) == tokens, "HBM has other tokens"
            else:
                assert found == before, "HBM has another parent"
            before = block_hash

    def _learn(self, event: BlockStored) -> None:
        if event.kv_cache_spec_kind != _FULL:
            return
        parent, self._block_size = event.parent_block_hash, event.block_size
        for i, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            self._told[block_hash] = parent, tokens
            self._hashes[parent, tokens] = parent = block_hash

    def hashes_of(self, tokens: Sequence[int]) -> list[Any]:
        """Hashes of the leading blocks of a prompt, as far as some engine has had them in HBM."""
        found: list[Any] = []
        parent, size = None, self._block_size
        for start in range(0, len(tokens) - size + 1 if size else 0, size):
            parent = self._hashes.get((parent, tuple(tokens[start : start + size])))
            if parent is None:
                break
            found.append(parent)
        return found

    def num_host_tokens(self, hashes: Sequence[Any], num_tokens: int, *, block_size: int) -> int:
        """The number of leading tokens of a prompt with these block hashes that can be loaded."""
        if not self._chunk_tokens:
            return 0
        size = self._chunk_tokens // block_size
        chunks = hashes[size - 1 :: size]
        if len(self.groups) == 1:
            (host,) = self.host.values() or [set()]
            end = next((i for i, chunk in enumerate(chunks) if chunk not in host), len(chunks))
            return max(0, min(end * self._chunk_tokens, num_tokens - 1))
        ends = range(min(len(chunks), (num_tokens - 1) // self._chunk_tokens), 0, -1)
        return next((end * self._chunk_tokens for end in ends if self._has_all(chunks[:end])), 0)

    def _has_all(self, chunks: Sequence[Any]) -> bool:
        for group, (kind, window) in self.groups.items():
            if kind == _WINDOW:
                assert window is not None
                needed = chunks[max(0, len(chunks) - -(-(window - 1) // self._chunk_tokens)) :]
            else:
                needed = {_FULL: chunks, _STATE: chunks[-1:]}[str(kind)]
            if not self.host.get(group, set()).issuperset(needed):
                return False
        return True
