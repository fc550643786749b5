"""Compares the tokens of tpu-inference's model runner with vLLM's, and works around two of its defects.

KV is saved under a hash of the tokens that vLLM has. If the runner computed it on other tokens, every request that
finds it gives wrong answers. Two defects of tpu-inference 0.32 cause that, both with async scheduling:

    Lost token      A step is dispatched before the tokens of the previous one are on the host. Until they are, each
                    request's state has 0 in their place. `_modify_prev_results` writes them, but only for requests in
                    the next step. A request that is not in it (preempted, or not scheduled) keeps the 0, and continues
                    with it.

    Stale token     A reset of running requests preempts and resumes them in one step. vLLM drops the token in flight,
                    or has accepted it if it waited for the step (as a pause does). The runner has done neither: it
                    writes the token when the next step has begun, over whatever is last by then. And if all of the
                    request's prompt was found, the runner treats it as decoding, and the engine ends.

Whenever a request is not in a step, `RunnerTokens` checks whether the runner has lost its token, and writes it. Most of
these requests have just generated their last token, so nothing is logged before one is scheduled again. A resumed
request gets vLLM's tokens before the runner reads its state. A request is *tainted*, and no longer saved, if

    it is scheduled again after a token was lost and could not be restored,
    it is resumed while the runner has a token for it, and could not be given vLLM's tokens, or
    the runner and vLLM disagree on a token of a block that is about to be saved.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

from tpu_offload.adapters.vllm.block_tables import blocks_from, with_distinct_ids

_logger = logging.getLogger(__name__)
_LOST_TOKEN = "tpu-inference lost the in-flight token of a request that was not in the next step"


@dataclasses.dataclass(frozen=True, slots=True)
class TaintedBlocks:
    """A request that was tainted.

    Attributes:
      request_id: the request.
      rank: its data-parallel rank; None if it is not known, as without ranks.
      block_ids: its blocks from the first that may be wrong on. Rows of states are negative ids.
    """

    request_id: str
    rank: int | None
    block_ids: tuple[int, ...]


@final
class RunnerTokens:
    """The tokens of one model runner. All calls come from the thread that runs the model.

    Args:
      runner: tpu-inference's model runner.
      restore: write lost tokens, and give resumed requests vLLM's tokens.
      block_size: tokens in a block.
      state_groups: vLLM's KV cache groups of states.
    """

    def __init__(self, runner: Any, *, restore: bool, block_size: int, state_groups: Collection[int] = ()) -> None:
        self._runner = runner
        self._restore_enabled = restore
        self._block_size = block_size
        self._state_groups = state_groups
        self._extract = _import_extract()
        self._logged: set[str] = set()
        # Requests that were tainted and have not ended, and those that `take_newly_tainted` has not returned yet.
        self._tainted: set[str] = set()
        self._newly_tainted: list[TaintedBlocks] = []
        self._ranks: Mapping[str, int] = {}  # of the requests of this step, if there are data-parallel ranks
        # Per request that has not been scheduled again: position of the first lost token, and whether it was restored.
        self._lost: dict[str, tuple[int, bool]] = {}
        self._original = getattr(runner, "_modify_prev_results", None)
        if self._original is not None:
            runner._modify_prev_results = self._modify_prev_results
        self._batches = getattr(runner, "persistent_batch_manager", None)
        self._original_update = getattr(self._batches, "update_states", None)
        if self._original_update is not None:
            self._batches.update_states = self._update_states  # type: ignore[union-attr]

    def close(self) -> None:
        """Restores the runner's own methods."""
        if self._original is not None:
            del self._runner._modify_prev_results
            self._original = None
        if self._original_update is not None:
            del self._batches.update_states  # type: ignore[union-attr]
            self._original_update = self._batches = None

    @property
    def tainted(self) -> frozenset[str]:
        """Requests whose KV may have been computed on other tokens than vLLM's."""
        return frozenset(self._tainted)

    def take_newly_tainted(self) -> list[TaintedBlocks]:
        """Requests that were tainted since the last call."""
        newly_tainted, self._newly_tainted = self._newly_tainted, []
        return newly_tainted

    def finish(self, request_ids: Collection[str]) -> None:
        """Requests ended; their ids may be reused."""
        if self._tainted:
            self._tainted.difference_update(request_ids)

    def compare(self, request_id: str, first: int, token_ids: Sequence[int]) -> None:
        """Compares the tokens of a request of the current step, from position `first` on, with those that vLLM has."""
        if request_id in self._tainted:
            return
        read = self._read_tokens(request_id, first, first + len(token_ids))
        num_same = next((i for i, (a, b) in enumerate(zip(read, token_ids, strict=False)) if a != b), len(read))
        if num_same < len(token_ids):
            self._taint(request_id, first + num_same, "the model runner has other tokens than vLLM")

    def _read_tokens(self, request_id: str, first: int, end: int) -> Sequence[int]:
        """The runner's tokens of a request; none if it is not in the batch or they cannot be read."""
        try:
            batch = self._runner.input_batch
            token_ids: list[int] = batch.token_ids_cpu[batch.req_id_to_index[request_id], first:end].tolist()
        except (AttributeError, KeyError, IndexError, TypeError):
            return ()
        return token_ids

    def _taint(self, request_id: str, first: int, reason: str) -> None:
        if request_id in self._tainted:
            return
        state = getattr(self._runner, "requests", {}).get(request_id)
        self._tainted.add(request_id)
        tables = with_distinct_ids(state.block_ids if state is not None else (), self._state_groups)
        blocks = blocks_from(tables, first // self._block_size)
        rank = self._ranks.get(request_id)
        self._newly_tainted.append(TaintedBlocks(request_id, rank, tuple(sorted(blocks))))
        self._log_once("tainted", logging.ERROR, f"{reason} (request {request_id!r:.100}); nothing more of it is saved")

    def _log_once(self, event: str, level: int, line: str) -> None:
        if event not in self._logged:
            self._logged.add(event)
            _logger.log(level, "%s. Further cases are not logged", line)

    # These replace methods of the runner. Errors in the workaround must not end the engine.

    def _update_states(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps the runner's method, which it calls at the beginning of each step."""
        assert self._original_update is not None
        self._ranks = getattr(output, "assigned_dp_rank", None) or {}
        resumed: set[str] = set()
        try:
            resumed = self._resumed_with_pending_token(output)
            if resumed and self._restore_enabled:
                self._set_known_tokens(resumed, output.scheduled_cached_reqs.all_token_ids)
                resumed = set()
        except Exception as e:
            self._log_incompatible(e)
        returned = self._original_update(output, *args, **kwargs)
        try:
            for request_id in output.finished_req_ids:  # the id may be reused in this very step
                self._lost.pop(request_id, None)
            for request_id in self._lost.keys() & output.num_scheduled_tokens.keys():
                self._on_rescheduled(request_id)
            for request_id in resumed:
                last = self._runner.requests[request_id].num_tokens - 1
                self._taint(request_id, last, "a request was resumed before the model runner had its last token")
        except Exception as e:
            self._log_incompatible(e)
        return returned

    def _on_rescheduled(self, request_id: str) -> None:
        """A request that lost a token is in a step again."""
        first, restored = self._lost.pop(request_id)
        if self._runner.requests[request_id].num_tokens <= first:
            return  # vLLM has dropped the token
        if not restored:
            self._taint(request_id, first, _LOST_TOKEN)
        else:
            how = "it was restored (see docs/upstream; TPU_OFFLOAD_PATCH_RUNNER=0 turns this off)"
            self._log_once("restored", logging.WARNING, f"{_LOST_TOKEN}; {how}")

    def _resumed_with_pending_token(self, output: Any) -> set[str]:
        """Resumed requests of a step for which the runner has a token that it has not written yet."""
        resumed: Collection[str] = output.scheduled_cached_reqs.resumed_req_ids
        results = self._runner._pre_async_results
        if not resumed or results is None:
            return set()
        return {state.req_id for _, state, _ in results.request_seq_lens if state.req_id in resumed}

    def _set_known_tokens(self, request_ids: Collection[str], known: Mapping[str, Sequence[int]]) -> None:
        states = {request_id: self._runner.requests[request_id] for request_id in request_ids}
        outputs = {request_id: known[request_id][len(state.prompt_token_ids) :] for request_id, state in states.items()}
        results = self._runner._pre_async_results
        for request_id, state in states.items():
            state.output_token_ids[:] = outputs[request_id]
        results.request_seq_lens = [row for row in results.request_seq_lens if row[1].req_id not in request_ids]
        for request_id in request_ids:
            results.placeholder_req_id_to_index.pop(request_id, None)

    def _modify_prev_results(self) -> None:
        """Wraps the runner's method, and restores the tokens that it loses."""
        assert self._original is not None
        try:
            results = self._runner._pre_async_results
            sampled = self._sampled(results)
            absent = [(index, state, list(state.output_token_ids)) for index, state, row in sampled if row is None]
        except Exception as e:
            absent = []
            self._log_incompatible(e)
        self._original()
        try:
            # A runner without the defect has changed them itself.
            lost = [(index, state) for index, state, before in absent if state.output_token_ids == before]
            if lost:
                self._restore(results, lost)
        except Exception as e:
            self._log_incompatible(e)

    def _log_incompatible(self, error: Exception) -> None:
        line = f"checking the tokens of tpu-inference failed ({error!r:.200}); tokens that it loses are not restored"
        self._log_once("incompatible", logging.ERROR, line)

    def _sampled(self, results: Any) -> list[tuple[int, Any, int | None]]:
        """Live requests that sampled a token in the last step: index in that step, state, row in this step or None."""
        rows, requests = self._runner.input_batch.req_id_to_index, self._runner.requests
        unsampled = set(results.discard_sampled_tokens_req_indices)
        return [
            (index, state, rows.get(state.req_id))
            for index, state, _ in results.request_seq_lens
            if index not in unsampled and requests.get(state.req_id) is state
        ]

    def _restore(self, results: Any, lost: Sequence[tuple[int, Any]]) -> None:
        """Writes sampled tokens into the states of requests, given with their index in the step that sampled them."""
        one_token = not getattr(results, "is_continue_decode", False)
        possible = self._restore_enabled and self._extract is not None and one_token
        sampled = None
        for index, state in lost:
            num_placeholders, outputs = _num_placeholders(results, state), state.output_token_ids
            if not possible or any(outputs[-num_placeholders:]):
                self._record_lost(state.req_id, state.num_tokens - num_placeholders, restored=False)
                continue
            if sampled is None:
                assert self._extract is not None
                sampled = self._extract(
                    self._runner,
                    results.spec_decode_metadata,
                    results.next_tokens,
                    results.logits_indices_selector,
                    results.discard_sampled_tokens_req_indices,
                    len(results.req_ids),
                )
            first = state.num_tokens - num_placeholders
            outputs[len(outputs) - num_placeholders :] = sampled[index][:num_placeholders]
            self._record_lost(state.req_id, first, restored=True)

    def _record_lost(self, request_id: str, first: int, *, restored: bool) -> None:
        self._lost[request_id] = first, restored
        if self._original_update is None:  # without the hook it is not known when the request is scheduled again
            self._on_rescheduled(request_id)


def _num_placeholders(results: Any, state: Any) -> int:
    """The number of placeholders (zeros) for the tokens that a request has sampled."""
    if getattr(results, "is_continue_decode", False):
        return int(results.continue_decode_max_steps)
    scheduled = results.scheduler_output
    return 1 + len(scheduled.scheduled_spec_decode_tokens.get(state.req_id, ())) if scheduled is not None else 1


def _import_extract() -> Callable[..., list[list[int]]] | None:
    """tpu-inference's function that returns the sampled tokens on the host; None if this version has none."""
    try:
        from tpu_inference.runner.utils import host_extract_sampled_tokens
    except ImportError:
        return None
    extract: Callable[..., list[list[int]]] = host_extract_sampled_tokens
    return extract
