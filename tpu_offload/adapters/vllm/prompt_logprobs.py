"""Keeps the prompt logprobs of requests that leave the batch of tpu-inference's model runner and return to it.

tpu-inference 0.32 collects a prompt's log probabilities in a buffer of the request, chunk by chunk, and hands it over
with the last chunk. `InputBatch.add_request` makes a new buffer, of memory that is not initialized, and asks for the
log probabilities again whenever it adds the request. A request is added again if it was preempted, or if a step did not
schedule it. With a connector and async scheduling that is every running request after a preemption: vLLM then frees
blocks only when the step in flight has ended, so the next one is empty.

    Delivered       The request has generated tokens. It sends a second set of log probabilities, which vLLM appends to
                    the first: of the whole prompt if it was preempted, else what the memory held. That ends a server
                    if a number in it is no token (`OverflowError` where it is serialized or detokenized).

    Not delivered   The chunks so far are lost, and what the memory held is sent in their place.

    Reset           After a reset of running requests vLLM drops what is in flight. If that is the last chunk, the
                    runner still hands over the buffer, and the chunks of the resumed request find none, which ends the
                    engine.

    Rolled back     If a load destroys the caches, vLLM drops the step's output. A request whose last chunk was in that
                    step may stay in the batch. It has handed its buffer over, and nobody asks for another.

`PromptLogprobs` has the runner ask for nothing once vLLM has a token of the request or one is in flight, and else keep
the buffer that the request has, or make one if it has handed it over. A resumed request without tokens gets a state of
its own, because what is in flight for it takes the buffer from the old one. docs/upstream has the change to
tpu-inference.
"""

import copy
import dataclasses
import logging
from typing import Any, final

import numpy as np

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Incomplete:
    """A request whose prompt logprobs have been computed in part.

    Attributes:
      state: the runner's state of it.
      params: its sampling parameters.
      without: the same without prompt logprobs.
      num_logprobs: for each token of the prompt, without the token itself.
    """

    state: Any
    params: Any
    without: Any
    num_logprobs: int


@final
class PromptLogprobs:
    """The prompt logprobs of one model runner. All calls come from the thread that runs the model.

    Args:
      runner: tpu-inference's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._has_failed = False
        self._params: dict[str, Any] = {}  # of requests that are not asked for prompt logprobs any more, with these
        self._batches = getattr(runner, "persistent_batch_manager", None)
        self._original = getattr(self._batches, "update_states", None)
        if self._original is not None:
            self._wrapped = vars(self._batches).get("update_states")  # of another workaround
            self._batches.update_states = self._update_states  # type: ignore[union-attr]

    def close(self) -> None:
        """Restores the runner's method; what was wrapped later must have been restored before."""
        if self._original is not None:
            del self._batches.update_states  # type: ignore[union-attr]
            if self._wrapped is not None:
                self._batches.update_states = self._wrapped  # type: ignore[union-attr]
            self._original = self._batches = self._wrapped = None

    # This replaces a method of the runner. Errors in the workaround must not end the engine.

    def _update_states(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._original is not None
        incomplete: list[_Incomplete] = []
        try:
            incomplete = self._take_incomplete(output)
        except Exception as e:
            self._log_incompatible(e)
        # The thread that collects results may be writing to the buffers: they are not exchanged, not for a moment.
        for request in incomplete:
            request.state.sampling_params = request.without
        try:
            returned = self._original(output, *args, **kwargs)
        finally:
            for request in incomplete:
                request.state.sampling_params = request.params
        try:
            for request in incomplete:
                self._runner.input_batch.num_prompt_logprobs[request.state.req_id] = request.num_logprobs
        except Exception as e:
            self._log_incompatible(e)
        return returned

    def _take_incomplete(self, output: Any) -> list[_Incomplete]:
        """Requests of a step that keep their buffers. Those that need none are no longer asked for prompt logprobs."""
        incomplete: list[_Incomplete] = []
        cached, requests = output.scheduled_cached_reqs, self._runner.requests
        for request_id in output.finished_req_ids:
            self._params.pop(request_id, None)
        for request_id, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            state = requests[request_id]
            params = state.sampling_params = self._params.pop(request_id, state.sampling_params)
            if params is None or params.prompt_logprobs is None:
                continue
            without = copy.copy(params)
            without.prompt_logprobs = None
            if num_outputs:
                state.sampling_params = without  # vLLM has the parameters themselves, too: they are not changed
                self._params[request_id] = params
                continue
            if request_id in cached.resumed_req_ids:
                requests[request_id] = state = copy.copy(state)
            elif self._has_handed_over(state):
                state.in_progress_prompt_logprobs_cpu = self._new_buffer(state, params)
            buffer = state.in_progress_prompt_logprobs_cpu
            if buffer is not None:
                incomplete.append(_Incomplete(state, params, without, buffer[0].shape[1] - 1))
        return incomplete

    def _has_handed_over(self, state: Any) -> bool:
        """Whether a request has handed its buffer over, and is computed again without having left the batch."""
        batch, request_id = self._runner.input_batch, state.req_id
        is_asked = request_id in batch.num_prompt_logprobs
        return state.in_progress_prompt_logprobs_cpu is None and request_id in batch.req_id_to_index and not is_asked

    def _new_buffer(self, state: Any, params: Any) -> tuple[Any, ...] | None:
        """As `InputBatch.add_request` makes it, but of zeros; None for a prompt of one token.

        What was in flight for the old one has been collected: the scheduler leaves a request out until then that was
        rolled back (`rollback`).
        """
        num = len(state.prompt_token_ids) - 1
        all_logprobs = self._runner.input_batch.vocab_size
        num_logprobs = (all_logprobs if params.prompt_logprobs == -1 else params.prompt_logprobs) + 1
        if num <= 0:
            return None
        tables = [np.zeros((num, num_logprobs), dtype) for dtype in (np.int32, np.float32)]
        return *tables, np.zeros(num, np.int32)

    def _log_incompatible(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _logger.error(
                "the prompt logprobs of tpu-inference could not be read (%.200r); those of requests that are preempted "
                "or not in a step may be wrong. Further cases are not logged",
                error,
            )
