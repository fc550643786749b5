"""A prefix index as llm-d's router keeps one, from the bytes that vLLM publishes.

Written after llm-d-router's `pkg/kvevents` (engineadapter/vllm_msgpack.go, pool.go) and `pkg/kvcache/kvblock`
(in_memory.go), of September 2026:

- a batch is an array of a time and events; an event is a map with its class as `type`, or an array that begins with it;
- a hash is the last 8 bytes of vLLM's, as a number;
- tokens are hashed by the router itself, on top of what it knows the parent by: a block with an unknown parent is
  ignored; one without tokens is a further place of a block that is known;
- `AllBlocksCleared` empties all tiers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS: dict[str, tuple[str, ...]] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}

type Key = tuple[object, tuple[int, ...]]  # of a block: its parent's, and its tokens
type Place = tuple[str, int | None]  # a tier, and the KV cache group


class LlmdIndex:
    """Follows the events of one engine.

    Args:
      block_size: the router's, `tokenProcessorConfig.blockSizeTokens`.
      tiers: those of which it takes events; the others as if they did not come.

    Attributes:
      num_without_tokens: blocks whose events had no tokens.
      num_ignored: blocks that it could not place.
    """

    def __init__(self, block_size: int, tiers: Sequence[str] = ("gpu", "cpu")) -> None:
        self._block_size, self._tiers = block_size, tiers
        self._places: dict[Key, set[Place]] = {}
        self._key_of: dict[int, Key] = {}  # by vLLM's hash
        self.num_without_tokens = self.num_ignored = 0

    def take(self, payload: bytes) -> None:
        """Follows one message."""
        batch = msgspec.msgpack.decode(payload)
        assert isinstance(batch, list)
        assert isinstance(batch[0], float)
        for event in batch[1]:
            kind, *values = _as_array(event)
            fields = dict(zip(_FIELDS[kind], values, strict=False))
            if kind == "AllBlocksCleared":
                self._places.clear()
                self._key_of.clear()
            elif (tier := (fields["medium"] or "gpu").lower()) not in self._tiers:
                continue
            elif kind == "BlockStored":
                self._store(fields, (tier, fields["group_idx"]))
            else:
                self._remove(fields, (tier, fields["group_idx"]))

    def num_tokens(self, tokens: Sequence[int], tier: str) -> int:
        """The number of leading tokens of a prompt that this tier has."""
        parent: Key | None = None
        for num_found, block in enumerate(self._blocks_of(tokens)):
            parent = (parent, block)
            if not any(place[0] == tier for place in self._places.get(parent, ())):
                return num_found * self._block_size
        return len(tokens) // self._block_size * self._block_size

    def _store(self, fields: dict[str, Any], place: Place) -> None:
        hashes = [_short(block_hash) for block_hash in fields["block_hashes"]]
        if not fields["token_ids"]:
            self.num_without_tokens += len(hashes)
            for block_hash in hashes:
                if (known := self._key_of.get(block_hash)) is not None:
                    self._places.setdefault(known, set()).add(place)
            return
        assert len(fields["token_ids"]) == len(hashes) * fields["block_size"]
        assert fields["block_size"] == self._block_size
        parent: Key | None = None
        if fields["parent_block_hash"] is not None:
            parent = self._key_of.get(_short(fields["parent_block_hash"]))
            if parent is None:
                self.num_ignored += len(hashes)
                return
        for block_hash, block in zip(hashes, self._blocks_of(fields["token_ids"]), strict=True):
            parent = (parent, block)
            self._key_of[block_hash] = parent
            self._places.setdefault(parent, set()).add(place)

    def _remove(self, fields: dict[str, Any], place: Place) -> None:
        for block_hash in map(_short, fields["block_hashes"]):
            if (key := self._key_of.get(block_hash)) is None:
                continue
            places = self._places.get(key, set())
            places.discard(place)
            if not places:
                self._places.pop(key, None)
                del self._key_of[block_hash]

    def _blocks_of(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self._block_size
        for start in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])


def _as_array(event: dict[str, Any] | list[Any]) -> list[Any]:
    if isinstance(event, list):
        return event
    return [event["type"], *(event.get(name) for name in _FIELDS[event["type"]])]


def _short(block_hash: bytes | int) -> int:
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
