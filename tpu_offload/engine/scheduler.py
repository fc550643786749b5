"""Decides what each step computes: continuous batching, chunked prefill, preemption by swap or recompute.

First come, first served. A request is admitted when there are blocks for all its tokens so far, so a prompt never runs
out of blocks halfway; during generation it takes one more block at a time. When there are too few, as few of the newest
requests as possible are preempted (`choose_victims`). Their KV is swapped out, or they are recomputed later, with the
generated tokens as part of their prompt.

A preempted request keeps its place in the queue, ahead of all later ones, whether its KV is in host memory or not. That
bounds the wait: a preempted request waits only for those that hold blocks now and for older ones, a new request for
those before it. No request is overtaken. The oldest request is never a victim, so it always makes progress, and in turn
every other.

`num_computed_tokens` includes what the steps dispatched so far compute. If a sequence is preempted while its step is in
flight, that step reads and writes its blocks in program order before they are copied out or granted again, and its
sampled token is appended when it arrives, in any phase of the sequence.

This file is long because it is the whole of the schedule: what a step computes, who is preempted, who returns.
"""

import bisect
import operator
from collections.abc import Iterable
from collections.abc import Sequence as List

from tpu_offload import BlockHasher, Candidate, choose_victims
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.config import EngineConfig
from tpu_offload.engine.kv_blocks import BlockCopy, KVBlocks
from tpu_offload.engine.offloading import Offloading
from tpu_offload.engine.request import Request
from tpu_offload.engine.sequence import Phase, ScheduledTokens, Sequence
from tpu_offload.engine.state_rows import StateRows

type Batch = list[ScheduledTokens]


class Scheduler:
    """Owns the queue, the sequences that hold blocks, and the block pool.

    Args:
      config: sizes.
      hasher: hashes full blocks.
      offload: the offloading glue; None without offloading.
      windows: per layer group with attention, the tokens that a token attends to; 0 for all. The first group has full
        attention.
      has_states: whether the model has a layer group with states.
    """

    def __init__(
        self,
        config: EngineConfig,
        hasher: BlockHasher,
        *,
        offload: Offloading | None,
        windows: List[int] = (0,),
        has_states: bool = False,
    ) -> None:
        self._config = config
        self._hasher = hasher
        self._offload = offload
        states = StateRows(
            config.num_state_rows, block_size=config.block_size, prefix_caching=config.enable_prefix_caching
        )
        self._blocks = KVBlocks(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            windows=windows,
            max_step_tokens=config.max_num_batched_tokens,
            num_spare_blocks=config.num_spare_blocks,
            prefix_caching=config.enable_prefix_caching,
            on_evict=offload.evict if offload and offload.saves_on_eviction else None,
            states=states if has_states else None,
        )
        # Both from the oldest to the newest.
        self._waiting: list[Sequence] = []  # WAITING or SWAPPED
        self._active: list[Sequence] = []  # hold blocks
        self._sequences: dict[str, Sequence] = {}  # all of both, and FORKED ones
        self._copies: list[BlockCopy] = []
        self._num_arrived = 0
        self._num_preemptions = 0
        self._awaits_storage = False  # the first waiting sequence waits for KV to arrive in the host tier

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._sequences) - len(self._active)

    @property
    def num_active(self) -> int:
        """Sequences that hold blocks."""
        return len(self._active)

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is in host memory."""
        return sum(sequence.phase is Phase.SWAPPED for sequence in self._waiting)

    @property
    def awaits_copies(self) -> bool:
        """Whether any sequence waits for the end of a copy."""
        return self._awaits_storage or any(sequence.phase is not Phase.RUNNING for sequence in self._active)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._num_preemptions

    def why_unservable(self, request: Request) -> str:
        """Why the request can never be served, in one line; empty if it can."""
        config, num_prompt = self._config, len(request.prompt_tokens)
        total = num_prompt + request.sampling.max_tokens
        asked = f"{num_prompt} prompt tokens and max_tokens={request.sampling.max_tokens}"
        if num_prompt == 0:
            return "the prompt is empty; expected at least one token"
        if total > config.max_model_len:
            return f"{asked} exceed max_model_len={config.max_model_len}"
        # The KV of the last token is never needed.
        needed = self._blocks.most_blocks(total - 1)
        if needed > self._blocks.total:
            return f"{asked} need {needed} blocks of {config.block_size} tokens, HBM has {self._blocks.total}"
        return ""

    def has(self, sequence_id: str) -> bool:
        """Whether this sequence is known and unfinished."""
        return sequence_id in self._sequences

    def add(self, sequence: Sequence, *forks: Sequence) -> None:
        """Queues the samples of a new request for which `why_unservable` is empty.

        Args:
          sequence: the sample that computes the prompt.
          *forks: the other samples, which wait for the prompt and share its blocks.
        """
        self._num_arrived += 1
        for sample in (sequence, *forks):
            sample.arrival = self._num_arrived
            self._sequences[sample.sequence_id] = sample
        for fork in forks:
            fork.phase, fork.leader = Phase.FORKED, sequence
        sequence.forks = list(forks)
        self._waiting.append(sequence)

    def finish(self, *sequence_ids: str) -> list[Sequence]:
        """Removes sequences in any phase, and frees their blocks and swapped-out KV.

        Raises:
          KeyError: an unknown sequence.
        """
        sequences = [self._sequences.pop(sequence_id) for sequence_id in sequence_ids]
        for sequence in sequences:
            if sequence.phase.holds_blocks:
                self._release_blocks(sequence)
            elif sequence.phase is Phase.FORKED and sequence.leader:
                sequence.leader.forks.remove(sequence)
            else:
                self._waiting.remove(sequence)
            sequence.phase = Phase.FINISHED
        if self._offload:
            self._offload.finish(sequences)
        for sequence in sequences:
            self._release_forks(sequence)
        return sequences

    def schedule(self) -> Batch:
        """Chooses the next batch: running sequences first, then waiting ones while tokens and blocks last."""
        self._blocks.release_skipped([s for s in self._active if s.phase is Phase.RUNNING])
        has_preempted = self._make_room()
        self._awaits_storage = False
        batch: Batch = []
        budget = self._config.max_num_batched_tokens
        for sequence in self._active:
            num_tokens = min(sequence.num_next_tokens, budget)
            if sequence.phase is Phase.RUNNING and num_tokens > 0:
                start = sequence.num_computed_tokens
                granted = self._blocks.grant(sequence, start + sequence.num_next_tokens, start=start)
                assert granted, "_make_room has made too little room"
                self._hash(sequence)
                batch.append(self._start(sequence, num_tokens))
                budget -= batch[-1].num_tokens
        # Not in a step that preempts: the victim would be admitted first, to its own blocks.
        while self._waiting and budget > 0 and not has_preempted:
            sequence = self._waiting[0]
            if len(self._active) == self._config.max_num_seqs or not self._try_admit(sequence, batch):
                break
            if sequence.phase is Phase.RUNNING:
                num_tokens = min(sequence.num_next_tokens, budget)
                batch.append(self._start(sequence, num_tokens))
                budget -= batch[-1].num_tokens
        return batch

    def take_copies(self) -> list[BlockCopy]:
        """Blocks to copy within HBM before the step that `schedule` has just chosen."""
        copies, self._copies = self._copies, []
        return copies

    def complete(self, batch: Batch, sampled: Iterable[tuple[int, float]], *, now_s: float) -> list[Sequence]:
        """Processes the results of a step, whose KV is in the blocks now.

        Args:
          batch: from `schedule`.
          sampled: per entry of the batch, the sampled token and its log-probability.
          now_s: the time.
        Returns:
          The sequences that got a new token. There is none for an entry that ends before the last known token, or whose
          sequence has ended since.
        """
        grown = []
        for run, (token, logprob) in zip(batch, sampled, strict=True):
            sequence = run.sequence
            if sequence.phase is Phase.FINISHED:
                continue
            if sequence.phase is Phase.RUNNING:
                self._hash(sequence)  # with tokens that were in flight when the step was chosen
                block_size = self._config.block_size
                self._blocks.register(sequence, run.start // block_size, run.end // block_size)
            if run.samples:
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                sequence.num_in_flight -= 1
                sequence.tokens.append(int(token))
                sequence.logprobs.append(float(logprob))
                self._release_forks(sequence)
                grown.append(sequence)
        return grown

    def end_load(self, sequence_id: str, *, num_valid_tokens: int | None = None) -> None:
        """A load has ended and its sequence can run.

        Args:
          sequence_id: the sequence.
          num_valid_tokens: None if the load succeeded; else the number of leading tokens with valid KV. The rest is
            computed.
        """
        sequence = self._sequences[sequence_id]
        assert sequence.phase is Phase.LOADING, f"load of {sequence_id} ended while {sequence.phase.value}"
        num_loaded = sequence.num_loading_tokens
        if num_valid_tokens is not None and not self._blocks.can_continue(sequence, num_valid_tokens):
            if self._offload:
                self._offload.abandon(sequence)
            self._release_blocks(sequence)
            bisect.insort(self._waiting, sequence, key=_order)
            self._restart(sequence)
            return
        if num_valid_tokens is not None:
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_valid_tokens)
            num_loaded = num_valid_tokens - sequence.num_computed_tokens
            sequence.is_stale = sequence.is_stale and num_valid_tokens > 0
        first_block = sequence.num_computed_tokens // self._config.block_size
        sequence.advance(num_loaded, source="host")
        self._blocks.register_loaded(sequence, first_block, sequence.num_computed_tokens // self._config.block_size)
        sequence.num_loading_tokens = 0
        sequence.phase = Phase.RUNNING

    def end_swap_in(self, sequence_id: str) -> None:
        """A swap-in has finished: the sequence can run."""
        sequence = self._sequences[sequence_id]
        assert sequence.phase is Phase.RETURNING, f"{sequence_id} was swapped in while {sequence.phase.value}"
        self._resume(sequence)

    def lose_swap(self, sequence_id: str) -> None:
        """The KV of a swapped-out sequence is lost: it is recomputed."""
        sequence = self._sequences[sequence_id]
        if sequence.phase is Phase.RETURNING:
            self._release_blocks(sequence)
            bisect.insort(self._waiting, sequence, key=_order)
        sequence.num_swaps -= 1
        self._restart(sequence)

    def mark_caches_lost(self, batch: Batch) -> int:
        """All KV in HBM is lost. Swapped-out sequences return as usual, all others are recomputed.

        Args:
          batch: the last result of `schedule`, which will not run.
        Returns:
          The number of sequences that held blocks.
        """
        for run in batch:
            run.sequence.num_in_flight -= run.samples
        self._copies = []
        if self._offload:
            self._offload.mark_caches_lost()
        lost = list(self._active)
        for sequence in lost:
            if self._offload:
                self._offload.abandon(sequence)
            self._release_blocks(sequence)
            bisect.insort(self._waiting, sequence, key=_order)
            self._restart(sequence)
        self._blocks.invalidate()
        return len(lost)

    def invalidate_prefixes(self) -> None:
        """Invalidates all prefixes, in HBM and swapped out, for other requests. Sequences keep their own KV."""
        for sequence in self._sequences.values():
            sequence.is_stale |= sequence.phase is Phase.SWAPPED or sequence.phase.holds_blocks
        self._blocks.invalidate()

    def check_invariants(self) -> None:
        """Raises AssertionError unless sequences and blocks agree. For tests."""
        self._blocks.check_invariants(self._active)
        assert len(self._active) <= self._config.max_num_seqs
        forked = [sequence for sequence in self._sequences.values() if sequence.phase is Phase.FORKED]
        assert len(self._sequences) == len(self._active) + len(self._waiting) + len(forked)
        assert all(sequence.phase.holds_blocks for sequence in self._active)
        assert all(sequence.phase in (Phase.WAITING, Phase.SWAPPED) for sequence in self._waiting)
        assert not any(sequence.block_tables for sequence in (*self._waiting, *forked))
        for sequences in (self._active, self._waiting):
            assert sequences == sorted(sequences, key=_order)
        for fork in forked:
            assert fork.leader is not None
            assert fork in fork.leader.forks
            assert fork.leader.sequence_id in self._sequences, "it waits for a prompt that no sequence computes"

    def _hash(self, sequence: Sequence) -> None:
        """Hashes the blocks that the known tokens fill, whether or not their KV is computed."""
        self._hasher.extend(sequence.block_hashes, sequence.tokens, cache_salt=sequence.request.cache_salt)

    def _start(self, sequence: Sequence, num_tokens: int) -> ScheduledTokens:
        """Schedules at most `num_tokens` tokens of a sequence."""
        start = sequence.num_computed_tokens
        num_tokens = self._blocks.clip(sequence, start, num_tokens)
        state_rows = self._blocks.advance_states(sequence, start, start + num_tokens)
        sequence.advance(num_tokens, source="computed")
        samples = sequence.num_computed_tokens == sequence.num_tokens
        sequence.num_in_flight += samples
        return ScheduledTokens(sequence, start, num_tokens, samples, state_rows)

    def _try_admit(self, sequence: Sequence, batch: Batch) -> bool:
        """Grants blocks to the first sequence in the queue, if there are enough."""
        if sequence.phase is Phase.SWAPPED:
            entered = self._swap_in(sequence)
        else:
            entered = self._fork(sequence, batch) or self._admit(sequence)
        if entered:
            self._waiting.pop(0)
            bisect.insort(self._active, sequence, key=_order)
        return entered

    def _admit(self, sequence: Sequence) -> bool:
        """Grants blocks for all known tokens: shared cached blocks, and new ones for the rest."""
        self._hash(sequence)
        # At least one token is left to compute, whose step samples the next.
        num_reusable = (len(sequence.tokens) - 1) // self._config.block_size
        hashes = sequence.block_hashes[:num_reusable]
        cached = self._blocks.find_prefix(hashes)
        junctions = self._blocks.parting(hashes, cached)
        num_cached_tokens = len(cached[0]) * self._config.block_size
        num_found = self._offload.look_up(sequence, num_computed_tokens=num_cached_tokens) if self._offload else 0
        if num_found is None:
            self._awaits_storage = True
            return False
        # Without spare blocks for the active sequences, this one would be preempted as soon as they grow.
        start = num_cached_tokens + num_found
        if not self._blocks.grant(sequence, len(sequence.tokens), start=start, shared=cached, active=self._active):
            if self._offload:
                self._offload.release(sequence)
            return False
        sequence.junctions |= junctions
        sequence.advance(num_cached_tokens, source="hbm")
        sequence.num_loading_tokens = num_found
        if self._offload:
            self._offload.start_load(sequence, num_found)
        sequence.phase = Phase.LOADING if sequence.num_loading_tokens else Phase.RUNNING
        return True

    def _fork(self, sequence: Sequence, batch: Batch) -> bool:
        """Admits another sample of a prompt whose blocks its leader has computed and still holds, if there is room."""
        leader = sequence.leader
        if leader is None or leader.phase is not Phase.RUNNING or sequence.output_tokens:
            return False
        # Without what the coming step computes: the leader may be recomputing its prompt.
        computed = next((run.start for run in batch if run.sequence is leader), leader.num_computed_tokens)
        if computed < len(sequence.tokens) - 1:
            return False
        self._hash(sequence)
        copies = self._blocks.fork(sequence, leader, active=self._active)
        if copies is None:
            return False
        self._copies += copies
        sequence.is_stale = leader.is_stale
        sequence.advance(len(sequence.tokens) - 1, source="hbm")
        if self._offload:
            self._offload.start_load(sequence, 0)
        sequence.phase = Phase.RUNNING
        return True

    def _swap_in(self, sequence: Sequence) -> bool:
        """Grants a swapped-out sequence its blocks and swaps it in; full blocks that are in HBM again are shared."""
        assert self._offload is not None, "only offloading swaps"
        if not self._offload.can_swap_in(sequence):
            return False
        self._hash(sequence)
        # Of windows all blocks are copied: the library knows only those of full attention by their hashes.
        present, *others = self._blocks.live(sequence, self._samples(sequence))
        shared = [present, *({} for _ in others)]
        start = sequence.num_computed_tokens
        if not self._blocks.grant(sequence, sequence.num_tokens, start=start, shared=shared, active=self._active):
            return False
        if self._offload.swap_in(sequence, present=present):
            sequence.phase = Phase.RETURNING
        else:
            self._resume(sequence)
        return True

    def _resume(self, sequence: Sequence) -> None:
        """Runs a swapped-in sequence; blocks that were computed again meanwhile are deduplicated."""
        self._blocks.deduplicate(sequence, self._samples(sequence))
        sequence.phase = Phase.RUNNING

    def _samples(self, sequence: Sequence) -> list[Sequence]:
        """Other running samples of its prompt."""
        if sequence.request.sampling.n == 1:
            return []
        same = (other for other in self._active if other.request is sequence.request and other is not sequence)
        return [other for other in same if other.phase is Phase.RUNNING]

    def _make_room(self) -> bool:
        """Preempts the sequences whose blocks the others need; returns whether there were any."""
        missing = [
            self._blocks.missing(s, s.num_computed_tokens + s.num_next_tokens, start=s.num_computed_tokens)
            if s.phase is Phase.RUNNING
            else 0
            for s in self._active
        ]
        if sum(missing) <= self._blocks.num_free:
            return False
        # One table for all layer groups: their blocks come from one pool.
        candidates = [
            Candidate(
                request_id=s.sequence_id,
                block_tables=[[block_id for table in s.block_tables for block_id in table if block_id != NULL_BLOCK]],
                num_new_blocks=[num_missing],
            )
            for s, num_missing in zip(self._active, missing, strict=True)
        ]
        for sequence_id in choose_victims(candidates, num_free=[self._blocks.num_free]):
            self._preempt(self._sequences[sequence_id])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        was_running = sequence.phase is Phase.RUNNING
        swapped = self._offload.preempt(sequence) if self._offload else False
        self._release_blocks(sequence)
        bisect.insort(self._waiting, sequence, key=_order)
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        if swapped:
            sequence.num_swaps += was_running  # one that was being swapped in has been counted
            sequence.phase = Phase.SWAPPED
        else:
            self._restart(sequence)

    def _restart(self, sequence: Sequence) -> None:
        """Resets it to nothing computed."""
        sequence.phase = Phase.WAITING
        sequence.is_stale = False
        sequence.num_computed_tokens = sequence.num_loading_tokens = 0

    def _release_blocks(self, sequence: Sequence) -> None:
        self._active.remove(sequence)
        num_valid_tokens = 0
        if sequence.phase is Phase.RUNNING:
            self._hash(sequence)
            num_valid_tokens = min(sequence.num_computed_tokens, len(sequence.tokens))
        self._blocks.release(sequence, num_valid_tokens=num_valid_tokens)

    def _release_forks(self, sequence: Sequence) -> None:
        """Unblocks the forks, because the prompt is computed, or this sequence will never compute it."""
        forks, sequence.forks = sequence.forks, []
        waits = sequence.phase is Phase.FINISHED and not sequence.output_tokens
        # If there is no prompt to share, the next sample computes it.
        heads, rest = (forks[:1], forks[1:]) if waits else (forks, [])
        for fork in heads:
            fork.phase, fork.forks = Phase.WAITING, rest
            fork.leader = None if waits else sequence
            bisect.insort(self._waiting, fork, key=_order)
            for other in rest:
                other.leader = fork


_order = operator.attrgetter("order")
