"""Rows for the states of linear attention: grants, shares, caches and releases them.

A state is that after all tokens so far; unlike KV it exists at one point of a sequence only. So the block table of the
state group is sparse: the entry at position `p` is the row with the state after exactly `(p + 1) * block_size` tokens,
or, at the last position, the row in use for a block that is not full yet. A step reads the row at its start and writes
the one at its end:

* From a block boundary it writes a row of its own. The row that it read keeps the boundary's state.
* From within a block it updates the row in place. If it ends in a later block, the row moves to that position.

A running sequence keeps the row of its last block boundary until the next one, so it holds up to two. There are two for
each sequence that may run: rows never run out, and what is left is a prefix cache.

A prefix hit of `n` blocks needs the state after exactly `n * block_size` tokens. The scheduler has steps end where hits
are likely to: at the last block boundary below the last token of a prompt, for requests with the same prompt, and at
junctions, where a prompt parts from one that was computed before, for the third prompt that begins so. These rows are
cached, and when a sequence is released, the one at the last boundary of what it has computed, for the next turn of its
conversation.

References:
  vLLM, `mamba_cache_mode="align"`: states at block boundaries.
"""

from collections import Counter
from collections.abc import Sequence as List
from typing import final

from tpu_offload import BlockHash
from tpu_offload.engine.block_manager import NULL_BLOCK, BlockManager
from tpu_offload.engine.sequence import Sequence


@final
class StateRows:
    """Grants rows of the state arrays to sequences.

    Args:
      num_rows: rows, without the null row; at least two for each sequence that runs.
      block_size: tokens in a block.
      prefix_caching: whether states are cached by hash.
    """

    def __init__(self, num_rows: int, *, block_size: int, prefix_caching: bool = True) -> None:
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._manager = BlockManager(num_rows)

    @property
    def num_free(self) -> int:
        """Free rows, including cached ones without a reference."""
        return self._manager.num_free

    @property
    def total(self) -> int:
        """All rows."""
        return self._manager.num_blocks

    def get(self, block_hash: BlockHash) -> int | None:
        """The cached row with the state after this block, None if there is none."""
        return self._manager.get(0, block_hash)

    def cached_end(self, hashes: List[BlockHash]) -> int:
        """The length in blocks of the longest of these prefixes whose state is cached; 0 if there is none."""
        end = len(hashes)
        while end > 0 and self.get(hashes[end - 1]) is None:
            end -= 1
        return end

    def live(self, sequence: Sequence) -> dict[int, int]:
        """By position, the cached row with the same state as a sequence whose computed tokens end with a block."""
        position, rest = divmod(sequence.num_computed_tokens, self._block_size)
        position -= 1
        if rest or position < 0 or not self._prefix_caching or sequence.is_stale:
            return {}
        row = self.get(sequence.block_hashes[position])
        return {} if row is None or row == sequence.states.get(position) else {position: row}

    def grant(self, sequence: Sequence, start: int, *, shared: dict[int, int]) -> None:
        """Grants a sequence without rows the one for the state after `start` tokens; none for `start` 0.

        Args:
          sequence: gets the row.
          start: the leading tokens that need not be computed.
          shared: by position, a row that holds the state there.
        """
        assert not sequence.states, "it has rows already"
        if start == 0:
            return
        position = (start - 1) // self._block_size
        if position in shared and start % self._block_size == 0:
            self._manager.share([shared[position]])
            sequence.states[position] = shared[position]
        else:
            sequence.states[position] = self._manager.allocate(1)[0]

    def advance(self, sequence: Sequence, start: int, end: int) -> tuple[int, int]:
        """Makes the row for the state after a step.

        Args:
          sequence: has the row for the state after `start` tokens.
          start: computed tokens before the step.
          end: computed tokens after it.
        Returns:
          The row to read, the null block if `start` is 0, and the row to write.
        """
        states = sequence.states
        before, after = (start - 1) // self._block_size, (end - 1) // self._block_size
        if start % self._block_size == 0:
            source = states[before] if start else NULL_BLOCK
            (states[after],) = self._manager.allocate(1)
        else:
            source = states.pop(before)
            states[after] = source
        return source, states[after]

    def release_skipped(self, sequence: Sequence) -> None:
        """Frees the rows before the last block boundary of a running sequence."""
        last = sequence.num_computed_tokens // self._block_size - 1
        for position in [position for position in sequence.states if position < last]:
            self._manager.free([sequence.states.pop(position)])

    def can_continue(self, sequence: Sequence, num_computed_tokens: int) -> bool:
        """Whether a sequence has the state after so many tokens, a multiple of the block size."""
        return num_computed_tokens // self._block_size - 1 in sequence.states

    def register(self, sequence: Sequence, first: int, end: int) -> None:
        """Adds the states at the boundaries after blocks `first` to `end - 1` that hits are likely to need."""
        for position in sorted(sequence.states):
            if first <= position < end and (position + 1) * self._block_size in self.boundaries(sequence):
                self.cache(sequence, position)

    def boundaries(self, sequence: Sequence) -> set[int]:
        """Numbers of tokens at which steps end, so that the state there can be kept."""
        size = self._block_size
        ends = sequence.num_prompt_tokens, len(sequence.tokens)  # they differ for one that is computed again
        return {(end - 1) // size * size for end in ends} | sequence.junctions

    def clip(self, sequence: Sequence, start: int, num_tokens: int) -> int:
        """The tokens of a step of at most `num_tokens`, so that it does not pass a boundary."""
        if num_tokens == 1:
            return 1
        end = start + num_tokens
        return min([end, *(b for b in self.boundaries(sequence) if start < b < end)]) - start

    def deduplicate(self, sequence: Sequence) -> None:
        """Shares the cached row with the same state, if there is one, and frees the sequence's own."""
        for position, row in self.live(sequence).items():
            self._manager.share([row])
            self._manager.free([sequence.states[position]])
            sequence.states[position] = row

    def release(self, sequence: Sequence, *, num_valid_tokens: int) -> None:
        """Frees a sequence's rows, and caches the state at the last boundary of its first `num_valid_tokens` tokens."""
        end = num_valid_tokens // self._block_size
        self.register(sequence, 0, end)
        if end - 1 in sequence.states:
            self.cache(sequence, end - 1)
        rows = [row for _, row in sorted(sequence.states.items())]
        sequence.states.clear()
        self._manager.free(rows)

    def cache(self, sequence: Sequence, position: int) -> None:
        """Adds the state at the boundary after a block, which the sequence holds, to the prefix cache."""
        if self._prefix_caching and not sequence.is_stale:
            self._manager.register(sequence.states[position], sequence.block_hashes[position])

    def invalidate(self) -> None:
        """Empties the prefix cache."""
        self._manager.invalidate()

    def check_invariants(self, active: List[Sequence]) -> None:
        """Raises AssertionError unless exactly the rows of these sequences are held. For tests."""
        holders: Counter[int] = Counter()
        positions: dict[int, int] = {}
        for sequence in active:
            self._check(sequence)
            for position, row in sequence.states.items():
                holders[row] += 1
                assert positions.setdefault(row, position) == position, f"row {row} is owned twice"
        self._manager.check_invariants(holders)
        for sequence in active:
            for position, row in sequence.states.items():
                full = (position + 1) * self._block_size <= sequence.num_computed_tokens + sequence.num_loading_tokens
                assert full or holders[row] == 1, "two sequences write into one row"
                assert full or self._manager.key_of(row) is None, "a state within a block is in the prefix cache"

    def _check(self, sequence: Sequence) -> None:
        computed = sequence.num_computed_tokens + sequence.num_loading_tokens
        assert len(sequence.states) <= 2, "more than two rows are held"
        assert bool(sequence.states) == bool(computed), "a state without tokens, or the other way round"
        if computed:
            assert max(sequence.states) == (computed - 1) // self._block_size, "the state of the last token is not held"
        for position, row in sequence.states.items():
            key = self._manager.key_of(row)
            assert key is None or not sequence.is_stale, "a state from before a reset is in the prefix cache"
            assert key in (None, (0, *sequence.block_hashes[position : position + 1])), "found by another's hash"
