"""Block tables of all layer groups: grants, shares and releases blocks.

Layers with full attention need one block per `block_size` tokens. Layers with a sliding window need a ring of blocks:
the block of token `t` is entry `t // block_size % ring_blocks`, and older tokens are overwritten. Full-attention blocks
can be shared and cached by hash; ring blocks cannot, because their contents change.
"""

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import final

from tpu_offload import BlockHash, CachedPrefix
from tpu_offload.engine.block_manager import BlockManager
from tpu_offload.engine.sequence import Origin, Sequence

type BlockCopy = tuple[int, int, int]  # layer group, block to read, block to write


@final
class KVBlocks:
    """Grants blocks of HBM to sequences.

    Args:
      num_blocks: blocks for layers with full attention.
      block_size: tokens in a block.
      num_window_blocks: blocks for layers with a window; 0 if there are none.
      ring_blocks: most window blocks that a sequence needs.
      window_tokens: tokens that a token attends to in those layers, itself included.
      num_spare_blocks: see `EngineConfig`.
      prefix_caching: whether full blocks are cached by hash. Always off with windows: a prefix is useless without its
        rings.
      on_evict: called for each cached prefix whose last block is about to be evicted.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_window_blocks: int = 0,
        ring_blocks: int = 0,
        window_tokens: int = 0,
        num_spare_blocks: int = 1,
        prefix_caching: bool = True,
        on_evict: Callable[[CachedPrefix], None] | None = None,
    ) -> None:
        self._block_size = block_size
        self._ring_blocks = ring_blocks
        self._window_tokens = window_tokens
        self._num_spare_blocks = num_spare_blocks
        self._prefix_caching = prefix_caching and not ring_blocks
        self._on_evict = on_evict
        # Per cached block, the sequence that it was computed for and its index there. Only with `on_evict`.
        self._origins: dict[int, tuple[Origin, int]] = {}
        self._full = BlockManager(num_blocks, on_evict=self._evict if on_evict else None)
        self._window = BlockManager(num_window_blocks)

    def num_blocks(self, num_tokens: int) -> tuple[int, int]:
        """Blocks needed for the KV of `num_tokens` tokens, per layer group."""
        full = -(-num_tokens // self._block_size)
        return full, min(full, self._ring_blocks)

    def missing(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """Of these, the blocks that a sequence lacks."""
        full, window = self.num_blocks(num_tokens)
        return max(0, full - len(sequence.block_ids)), max(0, window - len(sequence.window_block_ids))

    @property
    def num_free(self) -> tuple[int, int]:
        """Free blocks per layer group, including cached ones without a reference."""
        return self._full.num_free, self._window.num_free

    @property
    def total(self) -> tuple[int, int]:
        """All blocks, per layer group."""
        return self._full.num_blocks, self._window.num_blocks

    def find_prefix(self, hashes: List[BlockHash]) -> list[int]:
        """The cached blocks of the longest cached prefix."""
        return self._full.lookup(hashes) if self._prefix_caching else []

    def live(self, sequence: Sequence, samples: List[Sequence]) -> dict[int, int]:
        """Copies of a sequence's full blocks that are in HBM, apart from its own: index in its table -> block id.

        Args:
          sequence: the sequence.
          samples: running sequences of the same prompt. Those that differ from it in `is_stale` are ignored.
        """
        num_full = sequence.num_computed_tokens // self._block_size
        found = {}
        if self._prefix_caching and not sequence.is_stale:
            blocks = enumerate(map(self._full.get, sequence.block_hashes[:num_full]))
            found = {i: block_id for i, block_id in blocks if block_id is not None}
        for sample in samples:
            if sample.is_stale != sequence.is_stale:
                continue
            computed = min(sequence.num_prompt_tokens, sequence.num_computed_tokens, sample.num_computed_tokens)
            found = dict(enumerate(sample.block_ids[: computed // self._block_size])) | found
        own = sequence.block_ids
        return {i: block_id for i, block_id in found.items() if i >= len(own) or own[i] != block_id}

    def grant(
        self, sequence: Sequence, num_tokens: int, *, shared: dict[int, int] | None = None, active: List[Sequence] = ()
    ) -> bool:
        """Grants a sequence all blocks that it lacks for `num_tokens` tokens, or none; returns whether it did.

        Args:
          sequence: gets the blocks.
          num_tokens: tokens whose KV must fit.
          shared: for a sequence without blocks: held or cached blocks to share, by index in its table.
          active: sequences for each of which `num_spare_blocks` must stay free; none for a full ring.
        """
        shared = shared or {}
        full, window = self.missing(sequence, num_tokens)
        full -= len(shared)
        spare = self._num_spare_blocks * len(active)
        if not self._full.can_allocate(full + spare, cached=list(shared.values())):
            return False
        spare = self._num_spare_blocks * sum(len(other.window_block_ids) < self._ring_blocks for other in active)
        if window and not self._window.can_allocate(window + spare):
            return False
        self._full.share(list(shared.values()))
        new = iter(self._full.allocate(full))
        start = len(sequence.block_ids)
        sequence.block_ids += [
            shared[i] if i in shared else next(new) for i in range(start, start + full + len(shared))
        ]
        sequence.window_block_ids += self._window.allocate(window)
        return True

    def fork(self, sequence: Sequence, leader: Sequence, *, active: List[Sequence]) -> list[BlockCopy] | None:
        """Grants another sample of a prompt blocks with the KV of the prompt except its last token.

        Full blocks are shared. The partial block and the ring are copied.

        Args:
          sequence: has no blocks, and only the tokens of the prompt.
          leader: has computed the prompt and still holds its blocks.
          active: as in `grant`.
        Returns:
          The blocks to copy. None, with nothing granted, if there are too few blocks or the leader's ring has already
          overwritten what is needed.
        """
        num_reused = len(sequence.tokens) - 1
        num_shared = num_reused // self._block_size
        if self._ring_blocks and not self._ring_holds(leader, num_reused):
            return None
        shared = dict(enumerate(leader.block_ids[:num_shared]))
        if not self.grant(sequence, len(sequence.tokens), shared=shared, active=active):
            return None
        full, window = self.num_blocks(num_reused)
        copies = [(0, leader.block_ids[i], sequence.block_ids[i]) for i in range(num_shared, full)]
        return copies + [(1, leader.window_block_ids[i], sequence.window_block_ids[i]) for i in range(window)]

    def _ring_holds(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a ring still has all tokens that the token after the first `num_tokens` attends to.

        A ring has room for the window plus the largest step, so it does until the sequence has advanced by as many
        tokens as a step may compute.
        """
        newest = (sequence.num_computed_tokens - 1) // self._block_size
        oldest_needed = max(0, num_tokens - self._window_tokens + 1) // self._block_size
        return newest - self._ring_blocks < oldest_needed

    def register(self, sequence: Sequence, first: int, end: int) -> None:
        """Adds full blocks whose KV is in place to the prefix cache.

        Not those of a stale sequence: what it computes after a reset depends on KV from before it.
        """
        if self._prefix_caching and not sequence.is_stale:
            for i in range(first, end):
                block_id = sequence.block_ids[i]
                if self._full.register(block_id, sequence.block_hashes[i]) and self._on_evict:
                    self._origins[block_id] = sequence.origin, i

    def deduplicate(self, sequence: Sequence, samples: List[Sequence]) -> None:
        """Like `register`, for all full blocks of a sequence that was swapped in.

        Where an equal block is in HBM by now, that one is shared and the sequence's own is freed.
        """
        for i, live in self.live(sequence, samples).items():
            self._full.share([live])
            self._full.free([sequence.block_ids[i]])
            sequence.block_ids[i] = live
        self.register(sequence, 0, sequence.num_computed_tokens // self._block_size)

    def invalidate(self) -> None:
        """Empties the prefix cache."""
        self._full.invalidate()
        self._origins.clear()

    def _evict(self, block_ids: List[int]) -> None:
        """Reports the prefixes that end with these blocks; one that loses several blocks once, with the longest."""
        assert self._on_evict is not None
        longest: dict[int, int] = {}
        for block_id in block_ids:
            origin, number = self._origins.pop(block_id)
            if number < longest.get(id(origin), -1):
                continue
            longest[id(origin)] = number
            self._on_evict(
                CachedPrefix(
                    block_hashes=origin.block_hashes,
                    num_blocks=number + 1,
                    block_of=lambda group_id, block_hash: self._full.get(block_hash),
                    num_prompt_tokens=origin.num_prompt_tokens,
                    limits=origin.limits,
                )
            )

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks; what they cache stays findable until they are granted again."""
        self._full.free(sequence.block_ids)
        self._window.free(sequence.window_block_ids)
        sequence.block_ids, sequence.window_block_ids = [], []

    def check_invariants(self, active: List[Sequence]) -> None:
        """Raises AssertionError unless exactly the blocks of these sequences are held. For tests."""
        for manager, tables in (
            (self._full, [sequence.block_ids for sequence in active]),
            (self._window, [sequence.window_block_ids for sequence in active]),
        ):
            manager.check_invariants()
            assert manager.num_free == manager.num_blocks - len({block for table in tables for block in table})
        stale = [block for sequence in active if sequence.is_stale for block in sequence.block_ids]
        assert not any(map(self._full.is_registered, stale)), "KV from before a reset is in the prefix cache"
        rings = [block for sequence in active for block in sequence.window_block_ids]
        assert len(rings) == len(set(rings)), "two sequences write into one ring"
