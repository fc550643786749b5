"""Block tables of all layer groups: grants, shares and releases blocks.

A sequence has one block table for each layer group, by position: token `t` is in block `t // block_size`. A layer with
full attention needs all blocks. A layer with a sliding window needs the last ones; older ones are freed while the
sequence runs, and the table has the null block in their places. A layer with states has rows in place of blocks, from a
pool of their own (`state_rows`).

A prefix hit of `n` blocks needs blocks 0 to `n - 1` of the group with full attention and, of each group with a window,
the `window_blocks` ones before the hit's end, which the next tokens attend to. So a window's blocks are worth caching
only where hits are likely to end: at the last block boundary below the last token of a prompt, for requests with the
same prompt; and at the last boundary of what a sequence has computed when it is released, for the next turn of its
conversation. All others are freed without a hash, to be reused first. For the second boundary a running sequence keeps
a window's blocks from that before its last block boundary on, which is at most one more than its next token attends to.

References:
  vLLM, hybrid KV cache manager: groups of one size that share arrays, and sparse caching of windows.

This file is long because all that takes or frees a block of any layer group is here.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import final

from tpu_offload import BlockHash, CachedPrefix
from tpu_offload.engine.block_manager import NULL_BLOCK, BlockManager
from tpu_offload.engine.sequence import Origin, Sequence
from tpu_offload.engine.state_rows import StateRows

type BlockCopy = tuple[int, int]  # block to read, block to write
type FoundBlocks = List[dict[int, int]]  # per layer group, blocks by position; rows in a group with states


def num_skipped_blocks(num_computed_tokens: int, *, window: int, block_size: int) -> int:
    """Leading blocks of a layer group that are not needed any more after so many computed tokens.

    Neither a later token attends to them, nor the next token of a prefix hit that ends at the last block boundary.
    """
    return max(0, num_computed_tokens // block_size - _window_blocks(window, block_size)) if window else 0


def _window_blocks(window: int, block_size: int) -> int:
    """Blocks before a block boundary that the token after it attends to."""
    return -(-(window - 1) // block_size)


def most_blocks(num_tokens: int, *, windows: List[int], block_size: int, max_step_tokens: int) -> int:
    """Most blocks that a sequence holds until the KV of `num_tokens` tokens is computed; arguments as `KVBlocks`."""
    full = -(-num_tokens // block_size)
    step = -(-(max_step_tokens + block_size - 1) // block_size)
    return full + sum(min(full, _window_blocks(window, block_size) + step) for window in windows if window)


@final
class KVBlocks:
    """Grants blocks of HBM to sequences.

    Args:
      num_blocks: blocks, for all layer groups.
      block_size: tokens in a block.
      windows: per layer group with attention, the tokens that a token attends to, itself included; 0 for all. Only the
        first group has full attention.
      max_step_tokens: most tokens that a step computes.
      num_spare_blocks: see `EngineConfig`.
      prefix_caching: whether full blocks are cached by hash.
      on_evict: called for each cached prefix whose last block of full attention is about to be evicted.
      states: the rows of the layer group with states, the last one; None without such a group.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: List[int] = (0,),
        max_step_tokens: int,
        num_spare_blocks: int = 1,
        prefix_caching: bool = True,
        on_evict: Callable[[CachedPrefix], None] | None = None,
        states: StateRows | None = None,
    ) -> None:
        self._block_size = block_size
        self._states = states
        self._windows = tuple(windows)
        self._window_blocks = {g: _window_blocks(window, block_size) for g, window in enumerate(windows) if window}
        self._max_step_tokens = max_step_tokens
        self._num_spare_blocks = num_spare_blocks
        self._prefix_caching = prefix_caching
        self._on_evict = on_evict
        # Per cached block of full attention, the sequence that it was computed for and its index there. Only with
        # `on_evict`.
        self._origins: dict[int, tuple[Origin, int]] = {}
        self._manager = BlockManager(
            num_blocks, num_groups=len(self._windows), on_evict=self._evict if on_evict else None
        )

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds until the KV of `num_tokens` tokens is computed."""
        return most_blocks(
            num_tokens,
            windows=self._windows,
            block_size=self._block_size,
            max_step_tokens=self._max_step_tokens,
        )

    def missing(self, sequence: Sequence, num_tokens: int, *, start: int) -> int:
        """Blocks that a sequence lacks for `num_tokens` tokens; arguments as for `grant`."""
        return sum(max(0, end - first) for first, end in self._to_fill(sequence, num_tokens, start))

    @property
    def num_free(self) -> int:
        """Free blocks, including cached ones without a reference."""
        return self._manager.num_free

    @property
    def total(self) -> int:
        """All blocks."""
        return self._manager.num_blocks

    def find_prefix(self, hashes: List[BlockHash]) -> FoundBlocks:
        """The cached blocks of the longest prefix of which each layer group has what it needs."""
        if not self._prefix_caching:
            return self._nothing()
        full = self._manager.lookup(hashes)
        num_blocks, before = len(full), -1
        while num_blocks != before:
            before = num_blocks
            for group_id in self._window_blocks:
                num_blocks = self._cached_end(group_id, hashes[:num_blocks])
            if self._states:
                num_blocks = self._states.cached_end(hashes[:num_blocks])
        found = [dict(enumerate(full[:num_blocks]))]
        for group_id, window_blocks in self._window_blocks.items():
            first = max(0, num_blocks - window_blocks)
            found.append(dict(enumerate(self._manager.lookup(hashes[first:num_blocks], group_id=group_id), first)))
        if self._states:
            found.append(self._cached_state(hashes[:num_blocks]))
        return found

    def parting(self, hashes: List[BlockHash], hit: FoundBlocks) -> set[int]:
        """Where a prompt parts from others: the end, in tokens, of what is cached of it with full attention.

        Empty if that is where its hit ends, and in a model without states, of which steps need not end there.
        """
        num_blocks = len(self._manager.lookup(hashes)) if self._states and self._prefix_caching else 0
        return {num_blocks * self._block_size} if num_blocks > len(hit[0]) else set()

    def _cached_state(self, hashes: List[BlockHash]) -> dict[int, int]:
        """By position, the cached row with the state after these blocks."""
        row = self._states.get(hashes[-1]) if self._states and hashes else None
        return {} if row is None else {len(hashes) - 1: row}

    def live(self, sequence: Sequence, samples: List[Sequence]) -> FoundBlocks:
        """Copies of a sequence's full blocks that are in HBM, apart from its own.

        Args:
          sequence: the sequence.
          samples: running sequences of the same prompt. Those that differ from it in `is_stale` are ignored.
        """
        num_full = sequence.num_computed_tokens // self._block_size
        found = self._nothing()
        if self._states:
            found[-1] = self._states.live(sequence)
        for group_id in range(len(self._windows)):
            first = self._num_skipped(group_id, sequence.num_computed_tokens)
            blocks = {} if sequence.is_stale else self._cached(sequence, group_id, first, num_full)
            for sample in samples:
                if sample.is_stale != sequence.is_stale:
                    continue
                computed = min(sequence.num_prompt_tokens, sequence.num_computed_tokens, sample.num_computed_tokens)
                table = sample.block_tables[group_id][first : computed // self._block_size]
                blocks = {i: block_id for i, block_id in enumerate(table, first) if block_id != NULL_BLOCK} | blocks
            own = sequence.block_tables[group_id] if sequence.block_tables else []
            found[group_id] = {i: block_id for i, block_id in blocks.items() if i >= len(own) or own[i] != block_id}
        return found

    def grant(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        start: int,
        shared: FoundBlocks = (),
        active: List[Sequence] = (),
    ) -> bool:
        """Grants a sequence all blocks that it lacks for `num_tokens` tokens, or none; returns whether it did.

        With full attention it gets all of them at once, so that a prompt never runs out of blocks halfway; with a
        window those for the next step.

        Args:
          sequence: gets the blocks.
          num_tokens: tokens whose KV must fit.
          start: the leading ones that need not be computed, by the next step or a later one.
          shared: for a sequence without blocks: held or cached blocks to share.
          active: sequences for which blocks must stay free, see `EngineConfig.num_spare_blocks`.
        """
        to_fill = self._to_fill(sequence, num_tokens, start)
        states = shared[-1] if self._states and shared else {}
        # Of a window, blocks before `start` may be cached that are not needed there.
        shared = [
            {i: block_id for i, block_id in blocks.items() if i >= first}
            for blocks, (first, _) in zip(shared, to_fill, strict=False)
        ]
        cached = [block_id for blocks in shared for block_id in blocks.values()]
        num_new = sum(max(0, end - first) for first, end in to_fill) - len(cached)
        if sequence.block_tables and num_new == 0:  # by far the most frequent
            return True
        if not self._manager.can_allocate(num_new + self._num_spare(active), cached=cached):
            return False
        if self._states and not sequence.block_tables:
            self._states.grant(sequence, start, shared=states)
        self._manager.share(cached)
        new = iter(self._manager.allocate(num_new))
        tables = sequence.block_tables = sequence.block_tables or [[] for _ in self._windows]
        for table, (first, end), found in zip(tables, to_fill, shared or [{}] * len(tables), strict=True):
            table += [NULL_BLOCK] * (first - len(table))
            table += [found[i] if i in found else next(new) for i in range(first, end)]
        return True

    def fork(self, sequence: Sequence, leader: Sequence, *, active: List[Sequence]) -> list[BlockCopy] | None:
        """Grants another sample of a prompt blocks with the KV of the prompt except its last token.

        Full blocks are shared. The partial one of each layer group is copied. A state is shared if there is one at that
        token, which has to be a block boundary then.

        Args:
          sequence: has no blocks, and only the tokens of the prompt.
          leader: has computed the prompt and still holds its blocks.
          active: as in `grant`.
        Returns:
          The blocks to copy. None, with nothing granted, if there are too few blocks, a window of the leader has left
          one behind that is needed and not cached, or there is no such state.
        """
        num_reused = len(sequence.tokens) - 1
        num_shared, end = num_reused // self._block_size, self._num_blocks(num_reused)
        shared = self._nothing()
        for group_id, table in enumerate(leader.block_tables):
            first = self._num_skipped(group_id, num_reused)
            shared[group_id] = dict(enumerate(table[first:num_shared], first))
            if not leader.is_stale:
                end_left_behind = min(num_shared, table.count(NULL_BLOCK))
                shared[group_id] |= self._cached(sequence, group_id, first, end_left_behind)
            if NULL_BLOCK in (*shared[group_id].values(), *table[num_shared:end]):
                return None
        if self._states and num_reused:
            shared[-1] = self._leaders_state(leader, num_reused)
            if not shared[-1]:
                return None
        if not self.grant(sequence, len(sequence.tokens), start=num_reused, shared=shared, active=active):
            return None
        tables = zip(leader.block_tables, sequence.block_tables, strict=True)
        return [(source[i], target[i]) for source, target in tables for i in range(num_shared, end)]

    def _leaders_state(self, leader: Sequence, num_tokens: int) -> dict[int, int]:
        """By position, a row with the state of a sequence after so many tokens, held by it or cached."""
        position = num_tokens // self._block_size - 1
        if num_tokens % self._block_size:
            return {}
        if position in leader.states:
            return {position: leader.states[position]}
        return (
            {}
            if leader.is_stale or not self._prefix_caching
            else self._cached_state(leader.block_hashes[: position + 1])
        )

    def register(self, sequence: Sequence, first: int, end: int) -> None:
        """Adds full blocks whose KV is in place to the prefix cache; of a window those before the end of the prompt."""
        self._cache(sequence, 0, first, end)
        if self._states:
            self._states.register(sequence, first, end)
        for group_id in self._window_blocks:
            self._cache_before_prompt_end(sequence, group_id, first, end)

    def register_loaded(self, sequence: Sequence, first: int, end: int) -> None:
        """As `register`, of blocks that were loaded; with the state after them."""
        self.register(sequence, first, end)
        if self._states and end > first:
            self._states.cache(sequence, end - 1)

    def _cache_before_prompt_end(self, sequence: Sequence, group_id: int, first: int, end: int) -> None:
        """Caches what a hit at the last block boundary below the last token of the prompt needs of a window."""
        boundary = (sequence.num_prompt_tokens - 1) // self._block_size
        first = max(first, boundary - self._window_blocks[group_id])
        self._cache(sequence, group_id, first, min(end, boundary))

    def _cache(self, sequence: Sequence, group_id: int, first: int, end: int) -> None:
        """Adds blocks to the prefix cache.

        Not those of a stale sequence: what it computes after a reset depends on KV from before it.
        """
        if not self._prefix_caching or sequence.is_stale:
            return
        table = sequence.block_tables[group_id]
        for i in range(first, end):
            block_id = table[i]
            if block_id == NULL_BLOCK:  # with async scheduling a window may be ahead of the step that has ended
                continue
            added = self._manager.register(block_id, sequence.block_hashes[i], group_id=group_id)
            if added and self._on_evict and group_id == 0:
                self._origins[block_id] = sequence.origin, i

    def can_continue(self, sequence: Sequence, num_computed_tokens: int) -> bool:
        """Whether a sequence can compute from there on: no window and no state was granted for a later start."""
        if self._states and not self._states.can_continue(sequence, num_computed_tokens):
            return False
        return all(
            sequence.block_tables[group_id].count(NULL_BLOCK) <= self._num_skipped(group_id, num_computed_tokens)
            for group_id in self._window_blocks
        )

    def release_skipped(self, sequences: Iterable[Sequence]) -> None:
        """Frees the blocks that running sequences do not need any more.

        Steps in flight may read them: what later owners write comes after that in program order.
        """
        for group_id in self._window_blocks:
            for sequence in sequences:
                table = sequence.block_tables[group_id]
                end = first = self._num_skipped(group_id, sequence.num_computed_tokens)
                while first > 0 and table[first - 1] != NULL_BLOCK:
                    first -= 1
                if first < end:
                    self._cache_before_prompt_end(sequence, group_id, first, end)
                    self._manager.free(table[first:end])
                    table[first:end] = [NULL_BLOCK] * (end - first)
        if self._states:
            for sequence in sequences:
                self._states.release_skipped(sequence)

    def clip(self, sequence: Sequence, start: int, num_tokens: int) -> int:
        """The tokens that a step of at most `num_tokens` computes; fewer if a state at a boundary is to be kept."""
        return self._states.clip(sequence, start, num_tokens) if self._states else num_tokens

    def advance_states(self, sequence: Sequence, start: int, end: int) -> tuple[int, int]:
        """The rows that a step reads and writes (`StateRows.advance`); null blocks in a model without states."""
        return self._states.advance(sequence, start, end) if self._states else (NULL_BLOCK, NULL_BLOCK)

    def deduplicate(self, sequence: Sequence, samples: List[Sequence]) -> None:
        """Like `register`, for all full blocks of a sequence that was swapped in.

        Where an equal block is in HBM by now, that one is shared and the sequence's own is freed.
        """
        if self._states:
            self._states.deduplicate(sequence)
        for table, found in zip(sequence.block_tables, self.live(sequence, samples), strict=False):
            for i, live in found.items():
                self._manager.share([live])
                self._manager.free([table[i]])
                table[i] = live
        self.register(sequence, 0, sequence.num_computed_tokens // self._block_size)

    def invalidate(self) -> None:
        """Empties the prefix cache."""
        self._manager.invalidate()
        self._origins.clear()
        if self._states:
            self._states.invalidate()

    def _evict(self, block_ids: List[int]) -> None:
        """Reports the prefixes that end with these blocks; one that loses several blocks once, with the longest."""
        assert self._on_evict is not None
        longest: dict[int, int] = {}
        for block_id in filter(self._origins.__contains__, block_ids):
            origin, number = self._origins.pop(block_id)
            if number < longest.get(id(origin), -1):
                continue
            longest[id(origin)] = number
            self._on_evict(
                CachedPrefix(
                    block_hashes=origin.block_hashes,
                    num_blocks=number + 1,
                    block_of=self._manager.get,
                    num_prompt_tokens=origin.num_prompt_tokens,
                    limits=origin.limits,
                )
            )

    def release(self, sequence: Sequence, *, num_valid_tokens: int) -> None:
        """Frees a sequence's blocks; what they cache stays findable until they are granted again.

        Args:
          sequence: the sequence.
          num_valid_tokens: leading tokens whose KV is in place once the steps dispatched so far have run, and whose
            full blocks are hashed. A hit can end after them.
        """
        if self._prefix_caching and not sequence.is_stale:
            end = first = num_valid_tokens // self._block_size
            while first > 0 and self._manager.get(0, sequence.block_hashes[first - 1]) is None:
                first -= 1
            self._cache(sequence, 0, first, end)
            for group_id, window_blocks in self._window_blocks.items():
                self._cache(sequence, group_id, max(0, end - window_blocks), end)
        if self._states:
            self._states.release(sequence, num_valid_tokens=num_valid_tokens)
        tables, sequence.block_tables = sequence.block_tables, []
        rows = itertools.zip_longest(*tables, fillvalue=NULL_BLOCK)
        self._manager.free([block_id for row in rows for block_id in row if block_id != NULL_BLOCK])

    def check_invariants(self, active: List[Sequence]) -> None:
        """Raises AssertionError unless exactly the blocks of these sequences are held. For tests."""
        holders: Counter[int] = Counter()
        owners: dict[int, tuple[int, int]] = {}
        for sequence in active:
            for group_id, table in enumerate(sequence.block_tables):
                self._check_window(sequence, group_id)
                for i, block_id in enumerate(table):
                    if block_id == NULL_BLOCK:
                        continue
                    holders[block_id] += 1
                    owner = owners.setdefault(block_id, (group_id, i))
                    assert owner == (group_id, i), f"block {block_id} is owned twice"
                    key = self._manager.key_of(block_id)
                    assert key is None or not sequence.is_stale, "KV from before a reset is in the prefix cache"
                    assert key in (None, (group_id, *sequence.block_hashes[i : i + 1])), "found by another's hash"
        self._manager.check_invariants(holders)
        if self._states:
            self._states.check_invariants(active)
        for sequence in active:
            for table in sequence.block_tables:
                written = table[sequence.num_computed_tokens // self._block_size :]
                assert all(holders[block_id] == 1 for block_id in written if block_id != NULL_BLOCK), (
                    "two sequences write into one block"
                )

    def _check_window(self, sequence: Sequence, group_id: int) -> None:
        """Blocks from the first one needed on are held; those before it are not, but for the last step's."""
        table, computed = sequence.block_tables[group_id], sequence.num_computed_tokens + sequence.num_loading_tokens
        num_skipped = table.count(NULL_BLOCK)
        assert set(table[:num_skipped]) <= {NULL_BLOCK}, "a window has a hole"
        assert num_skipped <= self._num_skipped(group_id, computed), "a block was freed that is still needed"
        least = self._num_skipped(group_id, max(0, computed - self._max_step_tokens))
        assert num_skipped >= least, "a block outside the window is held"

    # Inside.

    def _cached(self, sequence: Sequence, group_id: int, first: int, end: int) -> dict[int, int]:
        """Blocks of the prefix cache with the same KV as those of a sequence, by position."""
        if not self._prefix_caching:
            return {}
        blocks = (self._manager.get(group_id, block_hash) for block_hash in sequence.block_hashes[first:end])
        return {i: block_id for i, block_id in enumerate(blocks, first) if block_id is not None}

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _num_skipped(self, group_id: int, num_computed_tokens: int) -> int:
        return num_skipped_blocks(num_computed_tokens, window=self._windows[group_id], block_size=self._block_size)

    def _nothing(self) -> list[dict[int, int]]:
        return [{} for _ in range(len(self._windows) + bool(self._states))]

    def _to_fill(self, sequence: Sequence, num_tokens: int, start: int) -> list[tuple[int, int]]:
        """Per layer group, the first position to grant a block for, and the end; see `grant`."""
        tables = sequence.block_tables
        ranges = [(len(tables[0]) if tables else 0, self._num_blocks(num_tokens))]
        for group_id in self._window_blocks:
            first = max(len(tables[group_id]) if tables else 0, self._num_skipped(group_id, start))
            ranges.append((first, self._num_blocks(min(num_tokens, start + self._max_step_tokens))))
        return ranges

    def _num_spare(self, active: List[Sequence]) -> int:
        """Blocks that must stay free for the growth of these sequences."""
        growing = len(active)
        for window_blocks in self._window_blocks.values():
            growing += sum(other.num_computed_tokens // self._block_size <= window_blocks for other in active)
        return growing * self._num_spare_blocks

    def _cached_end(self, group_id: int, hashes: List[BlockHash]) -> int:
        """The end of the longest prefix that has cached all of a window's blocks before it."""
        end = first = len(hashes)
        while first > max(0, end - self._window_blocks[group_id]):
            first -= 1
            if self._manager.get(group_id, hashes[first]) is None:
                end = first
        return end
