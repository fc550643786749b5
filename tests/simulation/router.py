"""What a router knows of the host tier, by the events alone, and where it sends a request for."""

from collections.abc import Sequence
from typing import final

from tests.simulation.groups import Group
from tests.simulation.memory import Violation
from tpu_offload import BlockHash
from tpu_offload.core.index import Changes
from tpu_offload.hashing import last_block_hash
from tpu_offload.piece_keys import PieceKey, chunk_of, group_of


@final
class Router:
    """Follows the changes of an index; has no part in what they mean for slots.

    Args:
      groups: the layer groups.
      blocks_per_chunk: blocks in a chunk.
    """

    def __init__(self, groups: Sequence[Group], blocks_per_chunk: int) -> None:
        self._groups = groups
        self._size = blocks_per_chunk
        self._known: list[set[BlockHash]] = [set() for _ in groups]

    def take(self, changes: Changes) -> None:
        """Follows one entry of the list of changes."""
        if changes.keys is None:
            for known in self._known:
                known.clear()
            return
        for key in changes.keys:
            piece = PieceKey(key)
            group, chunk = (1 + group_of(piece), chunk_of(piece)) if changes.of_pieces else (0, key)
            known, name = self._known[group], last_block_hash(chunk)
            if (name in known) is changes.found:
                how = "stored twice" if changes.found else "removed without having been stored"
                raise Violation(f"layer group {group}: by the events, a chunk or state is {how}")
            (known.add if changes.found else known.remove)(name)

    def num_cached_tokens(self, hashes: Sequence[BlockHash], num_tokens: int, block_size: int) -> int:
        """How many tokens of a prompt can be loaded, with several layer groups."""
        chunks = hashes[self._size - 1 :: self._size]
        chunk_tokens = self._size * block_size
        for end in range(min(len(chunks), (num_tokens - 1) // chunk_tokens), 0, -1):
            pieces = [group.pieces(end * chunk_tokens, self._size) for group in self._groups]
            if all(
                chunks[positions.start // self._size] in known
                for known, needed in zip(self._known, pieces, strict=True)
                for positions in needed
            ):
                return end * chunk_tokens
        return 0
