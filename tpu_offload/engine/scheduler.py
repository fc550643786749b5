"""Decides what each step computes: continuous batching, chunked prefill, preemption by recompute.

First come, first served. A request is admitted when there are blocks for all its tokens so far, so a
prompt never runs out of blocks half way; while it generates, it takes one more block at a time. If none
is free, the request admitted last gives its blocks back and starts over later, with the tokens it has
generated as part of its prompt. The oldest request is never a victim, so it always gets on, and with it
in turn every other.
"""

from collections import deque
from collections.abc import Iterable

from tpu_offload import BlockHasher
from tpu_offload.engine.block_manager import BlockManager
from tpu_offload.engine.config import EngineConfig
from tpu_offload.engine.offloading import Offloading
from tpu_offload.engine.request import Request
from tpu_offload.engine.sequence import Phase, Sequence

type Batch = list[tuple[Sequence, int]]  # sequences of a step, and how many tokens of each it computes


class Scheduler:
    """Owns the queue, the sequences that hold blocks, and the block pool.

    Args:
      config: sizes.
      hasher: names full blocks by their contents.
      offload: where evicted KV may still be; None without offloading.
    """

    def __init__(self, config: EngineConfig, hasher: BlockHasher, *, offload: Offloading | None) -> None:
        self._config = config
        self._hasher = hasher
        self._offload = offload
        self._blocks = BlockManager(config.num_blocks)
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []  # LOADING or RUNNING, in order of admission
        self._sequences: dict[str, Sequence] = {}  # all of both
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Sequences that hold blocks."""
        return len(self._active)

    @property
    def num_loading(self) -> int:
        """Sequences that wait for KV from the host."""
        return sum(sequence.phase is Phase.LOADING for sequence in self._active)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its blocks back before its end."""
        return self._num_preemptions

    def why_unservable(self, request: Request) -> str:
        """Why the request could never run to its end, in one line; empty if it can."""
        config, num_prompt = self._config, len(request.prompt_tokens)
        total = num_prompt + request.sampling.max_tokens
        asked = f"{num_prompt} prompt tokens and max_tokens={request.sampling.max_tokens}"
        if num_prompt == 0:
            return "the prompt is empty; expected at least one token"
        if total > config.max_model_len:
            return f"{asked} exceed max_model_len={config.max_model_len}"
        num_blocks = self._num_blocks(total - 1)  # the KV of the last token is never needed
        if num_blocks > config.num_blocks:
            return f"{asked} need {num_blocks} blocks of {config.block_size} tokens, HBM has {config.num_blocks}"
        return ""

    def has(self, request_id: str) -> bool:
        """Whether this request is here and unfinished."""
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence that `why_unservable` has nothing against."""
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def finish(self, request_id: str) -> Sequence:
        """Takes a sequence out, whatever its phase, and frees its blocks.

        Raises:
          KeyError: it is not here.
        """
        sequence = self._sequences.pop(request_id)
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            if self._offload:
                self._offload.finish(sequence)
            self._take_blocks(sequence)
        sequence.phase = Phase.FINISHED
        return sequence

    def schedule(self) -> Batch:
        """Chooses the next step: running sequences first, then new ones while tokens and blocks last."""
        batch: Batch = []
        budget = self._config.max_num_batched_tokens
        num_preemptions = self._num_preemptions
        for sequence in list(self._active):
            num_tokens = min(len(sequence.tokens) - sequence.num_computed_tokens, budget)
            # Victims are taken from the end of the list, so none of them is in the batch already.
            if sequence.phase is Phase.RUNNING and num_tokens > 0 and self._grow(sequence):
                self._hash(sequence)
                batch.append((sequence, num_tokens))
                budget -= num_tokens
        # What was preempted just now would be first in line for the very blocks it gave back.
        while self._waiting and budget > 0 and num_preemptions == self._num_preemptions:
            sequence = self._waiting[0]
            if len(self._active) == self._config.max_num_seqs or not self._admit(sequence):
                break
            if sequence.phase is Phase.RUNNING:
                num_tokens = min(len(sequence.tokens) - sequence.num_computed_tokens, budget)
                batch.append((sequence, num_tokens))
                budget -= num_tokens
        return batch

    def complete(self, batch: Batch, sampled: Iterable[int], *, now_s: float) -> list[Sequence]:
        """The step has run: its KV is in the blocks.

        Args:
          batch: what `schedule` returned.
          sampled: the token after each of its runs.
          now_s: the time.
        Returns:
          The sequences that got a new token. A run that ends inside the known tokens gets none.
        """
        grown = []
        for (sequence, num_tokens), token in zip(batch, sampled, strict=True):
            self._advance(sequence, num_tokens, source="computed")
            if sequence.num_computed_tokens == len(sequence.tokens):
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                sequence.tokens.append(int(token))
                grown.append(sequence)
        return grown

    def end_load(self, request_id: str, *, num_valid_tokens: int | None = None) -> None:
        """A load is over and its sequence can run.

        Args:
          request_id: whose.
          num_valid_tokens: None if all of it came; else how many leading tokens have their KV, and the
            rest is computed.
        """
        sequence = self._sequences[request_id]
        assert sequence.phase is Phase.LOADING, f"load of {request_id} ended while {sequence.phase.value}"
        if num_valid_tokens is None:
            self._advance(sequence, sequence.num_loading_tokens, source="host")
        else:
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_valid_tokens)
        sequence.num_loading_tokens = 0
        sequence.phase = Phase.RUNNING

    def check_invariants(self) -> None:
        """Raises AssertionError unless sequences and blocks agree. For tests."""
        self._blocks.check_invariants()
        assert len(self._active) <= self._config.max_num_seqs
        assert len(self._sequences) == len(self._active) + len(self._waiting)
        assert all(s.phase in (Phase.LOADING, Phase.RUNNING) for s in self._active)
        assert all(s.phase is Phase.WAITING and not s.block_ids for s in self._waiting)
        held = {block_id for sequence in self._active for block_id in sequence.block_ids}
        assert self._blocks.num_free == self._config.num_blocks - len(held)

    # Inside.

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _admit(self, sequence: Sequence) -> bool:
        """Grants blocks for all known tokens: shared ones that HBM still has, new ones for the rest."""
        config = self._config
        self._hash(sequence)
        cached: list[int] = []
        if config.enable_prefix_caching:
            # The last token is always computed: its logits are what the next one is sampled from.
            cached = self._blocks.lookup(sequence.block_hashes[: (len(sequence.tokens) - 1) // config.block_size])
        num_new = self._num_blocks(len(sequence.tokens)) - len(cached)
        # One spare block for each sequence that is here already: admitted without, this one would be
        # preempted as soon as they grow.
        if not self._blocks.can_allocate(num_new + len(self._active), cached=cached):
            return False
        self._blocks.share(cached)
        sequence.block_ids = cached + self._blocks.allocate(num_new)
        sequence.advance(len(cached) * config.block_size, source="hbm")
        sequence.num_loading_tokens = self._offload.start_load(sequence) if self._offload else 0
        sequence.phase = Phase.LOADING if sequence.num_loading_tokens else Phase.RUNNING
        self._waiting.popleft()
        self._active.append(sequence)
        return True

    def _hash(self, sequence: Sequence) -> None:
        """Names the blocks that the known tokens fill, whether or not their KV is there yet."""
        self._hasher.extend(sequence.block_hashes, sequence.tokens, cache_salt=sequence.request.cache_salt)

    def _grow(self, sequence: Sequence) -> bool:
        """Gets a running sequence the block for its newest token. False if it had to give up its own."""
        num_new = self._num_blocks(len(sequence.tokens)) - len(sequence.block_ids)
        while not self._blocks.can_allocate(num_new):
            victim = self._active[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self._blocks.allocate(num_new)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if self._offload:
            self._offload.preempt(sequence)
        self._take_blocks(sequence)
        sequence.phase = Phase.WAITING
        sequence.num_computed_tokens = sequence.num_loading_tokens = 0
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.appendleft(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        self._active.remove(sequence)
        self._blocks.free(sequence.block_ids)
        sequence.block_ids = []

    def _advance(self, sequence: Sequence, num_tokens: int, *, source: str) -> None:
        """The KV of the next tokens is in place: blocks that it fills go into the prefix cache."""
        first_block = sequence.num_computed_tokens // self._config.block_size
        sequence.advance(num_tokens, source=source)
        if not self._config.enable_prefix_caching:
            return
        for i in range(first_block, sequence.num_computed_tokens // self._config.block_size):
            self._blocks.register(sequence.block_ids[i], sequence.block_hashes[i])
