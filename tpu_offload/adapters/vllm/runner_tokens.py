"""The tokens that tpu-inference's model runner feeds, held against those that vLLM knows, and a fault of it mended.

KV is kept under a hash of the tokens that vLLM knows. If the runner computed it on others, every request that finds it
answers wrongly. There is one fault by which that happens, in tpu-inference 0.32 with async scheduling:

    A step is dispatched before the tokens of the one before it are on the host. Until they are, 0 stands in their
    place in the state of each request. `_modify_prev_results` puts them in, but only for requests that are in the
    next step. One that a step leaves out (preempted, or without a turn) keeps the 0, and goes on with it.

Whether a runner has it is seen from what it does, whenever a request is left out. Then the token is put in here. What
this cannot vouch for is not saved:

    left out     a request whose tokens were left out and could not be put in
    compared     a request of which the runner has another token, before the end of what is saved, than vLLM
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any, final

_logger = logging.getLogger(__name__)


@final
class RunnerTokens:
    """What one model runner feeds. All calls come from the thread that runs the model.

    Args:
      runner: tpu-inference's.
      mend: put in the tokens that it leaves out.
      block_size: tokens in a block.
    """

    def __init__(self, runner: Any, *, mend: bool, block_size: int) -> None:
        self._runner = runner
        self._mend = mend
        self._block_size = block_size
        self._said: set[str] = set()
        # Requests whose KV may be of other tokens than those that it would be kept under, until their end.
        self._distrusted: set[str] = set()
        self._news: dict[str, tuple[int, ...]] = {}
        self._original = getattr(runner, "_modify_prev_results", None)
        if self._original is not None:
            runner._modify_prev_results = self._modify_prev_results

    def close(self) -> None:
        """Leaves the runner as it was."""
        if self._original is not None:
            del self._runner._modify_prev_results
            self._original = None

    @property
    def distrusted(self) -> frozenset[str]:
        """Requests that are not to be saved."""
        return frozenset(self._distrusted)

    def take_news(self) -> dict[str, tuple[int, ...]]:
        """Those that joined them since the last call, with their blocks from the first that may be wrong on."""
        news, self._news = self._news, {}
        return news

    def finish(self, request_ids: Collection[str]) -> None:
        """Requests ended; others may come under the same ids."""
        if self._distrusted:
            self._distrusted.difference_update(request_ids)

    def compare(self, request_id: str, first: int, token_ids: Sequence[int]) -> None:
        """Holds tokens of a request of the step at hand, from its token `first` on, against those that vLLM knows."""
        if request_id in self._distrusted:
            return
        fed = self._fed(request_id, first, first + len(token_ids))
        num_same = (
            0
            if fed is None
            else next(
                (i for i, (ours, theirs) in enumerate(zip(fed, token_ids, strict=True)) if ours != theirs),
                len(token_ids),
            )
        )
        if num_same < len(token_ids):
            self._distrust(request_id, first + num_same, "the model runner has other tokens than vLLM for a request")

    def _fed(self, request_id: str, first: int, end: int) -> list[int] | None:
        """Tokens of a request that is in the batch; None if they cannot be had."""
        try:
            batch = self._runner.input_batch
            fed = batch.token_ids_cpu[batch.req_id_to_index[request_id], first:end].tolist()
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
        return fed if len(fed) == end - first else None

    def _distrust(self, request_id: str, first: int, why: str) -> None:
        state = self._runner.requests.get(request_id)
        self._distrusted.add(request_id)
        self._news[request_id] = tuple(state.block_ids[0][first // self._block_size :]) if state is not None else ()
        self._say_once("distrust", logging.ERROR, f"{why} ({request_id}): nothing more of it is saved")

    def _say_once(self, what: str, level: int, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.log(level, "tpu_offload: %s. This is said once", line)

    # In place of the runner's method.

    def _modify_prev_results(self) -> None:
        """The runner's own, and after it what that leaves out."""
        assert self._original is not None
        results = self._runner._pre_async_results
        left_out = self._left_out(results)
        before = [list(state.output_token_ids) for _, state, _ in left_out]
        self._original()
        for (place, state, _), tokens in zip(left_out, before, strict=True):
            if state.output_token_ids == tokens:  # else the runner has put them in itself
                self._put_in(results, place, state)

    def _left_out(self, results: Any) -> list[tuple[int, Any, int]]:
        """Requests of the last step that sampled a token and are in no batch now, though they have not ended."""
        batch, requests = self._runner.input_batch.req_id_to_index, self._runner.requests
        unsampled = set(results.discard_sampled_tokens_req_indices)
        return [
            (place, state, length)
            for place, state, length in results.request_seq_lens
            if place not in unsampled and state.req_id not in batch and requests.get(state.req_id) is state
        ]

    def _put_in(self, results: Any, place: int, state: Any) -> None:
        num_placeholders = 1
        if results.scheduler_output is not None:
            num_placeholders += len(results.scheduler_output.scheduled_spec_decode_tokens.get(state.req_id, ()))
        outputs = state.output_token_ids
        if not self._mend or getattr(results, "is_continue_decode", False) or any(outputs[-num_placeholders:]):
            first = state.num_tokens - num_placeholders
            self._distrust(state.req_id, first, "tpu-inference left out a token of a request that a step left out")
            return
        from tpu_inference.runner.utils import host_extract_sampled_tokens

        sampled = host_extract_sampled_tokens(
            self._runner,
            results.spec_decode_metadata,
            results.next_tokens,
            results.logits_indices_selector,
            results.discard_sampled_tokens_req_indices,
            len(results.req_ids),
        )
        outputs[len(outputs) - num_placeholders :] = sampled[place][:num_placeholders]
        self._say_once(
            "mend",
            logging.WARNING,
            "tpu-inference left a token out that was on its way when its request was left out of a step; it is put in "
            "(see docs/upstream; TPU_OFFLOAD_MEND_RUNNER=0 leaves it alone)",
        )
