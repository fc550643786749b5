"""The fake model's pass on all workers: which requests compute on what, and what they sample."""

from collections import deque
from collections.abc import Mapping, Sequence

from vllm.v1.request import Request

from tests.adapters.hashed_model import VOCABULARY, Prefix, continued, next_token
from tests.adapters.hashed_runner import Runner


class Passes:
    """The passes of an engine.

    A request that reads wrong KV computes wrong KV and samples wrong tokens. This is allowed only for requests that
    compute on blocks reported as invalid with this step, and in the next steps that were scheduled before the report
    arrived; anything else is an AssertionError.

    Args:
      runners: of all workers.
      requests: by id; the engine adds to them.
      num_ahead: steps that are scheduled before the first of them ends.
      is_async: the engine schedules a step before it knows the tokens of the previous one.
    """

    def __init__(
        self, runners: Sequence[Runner], requests: Mapping[str, Request], *, num_ahead: int, is_async: bool
    ) -> None:
        self.runners, self.requests, self.is_async = runners, requests, is_async
        self.num_wrong = 0
        self.wrong_anyway: set[str] = set()  # requests that are wrong without any connector
        # Of the steps that began before the last report arrived: requests that were wrong, and invalid blocks.
        self._wrong_before: deque[set[str]] = deque(maxlen=num_ahead)
        self._invalid_before: deque[set[int]] = deque(maxlen=num_ahead)
        self._ends_before: dict[str, int] = {}

    def sequence(self, request_id: str) -> Prefix:
        """The tokens of the request, and those that the model would generate."""
        prompt = tuple(self.requests[request_id].prompt_token_ids or ())
        return continued(prompt, len(prompt) + 64)

    def report(self, invalid: set[int]) -> None:
        """The blocks that were reported as invalid with the last pass."""
        self._invalid_before.append(invalid)

    def run(self, output, invalid: set[int]) -> dict[str, list[int]]:
        """Runs one pass.

        Args:
          output: vLLM's schedule of the step.
          invalid: the blocks that synchronous loads have not filled.
        Returns:
          The sampled tokens by request.
        """
        num_computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        num_computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._check_positions(output, num_computed)
        may_be_wrong = {
            request_id
            for request_id in output.num_scheduled_tokens
            if request_id in self.wrong_anyway
            or self._holds(request_id, set().union(invalid, *self._invalid_before))
            or any(request_id in wrong for wrong in self._wrong_before)
        }
        inputs: dict[str, Prefix] = {}
        num_drafts: dict[str, int] = {}
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            drafts = [max(draft, 0) for draft in drafts]  # -1 is padding; no valid token is 0
            end = num_computed[request_id] + num_scheduled
            inputs[request_id] = Prefix(self.sequence(request_id).tokens[: end - len(drafts)] + drafts)
            num_drafts[request_id] = len(drafts)
        self._run_states(num_computed, inputs)
        wrong = self._run_attention(num_computed, inputs, may_be_wrong)
        self.num_wrong += len(wrong)
        self._wrong_before.append(wrong)
        return {
            request_id: self._sample(request_id, prefix, num_drafts[request_id], wrong=request_id in wrong)
            for request_id, prefix in inputs.items()
        }

    def _run_states(self, num_computed: dict[str, int], inputs: dict[str, Prefix]) -> None:
        """Checks what the layers with states read, and writes them.

        vLLM has no request continue from the state of another one of the same pass.
        """
        for runner in self.runners:
            if runner.state_groups:
                for request_id in inputs:
                    known = self.sequence(request_id), num_computed[request_id]
                    assert runner.check_state(request_id, *known), f"{request_id} reads a state that is not its own"
                runner.write_states(inputs)

    def _run_attention(
        self, num_computed: dict[str, int], inputs: dict[str, Prefix], may_be_wrong: set[str]
    ) -> set[str]:
        """Writes the KV of the pass, then checks what attention reads; returns the requests that read wrong KV.

        As in a layer of a real model: every request's KV is written before any attention reads, so that one may share
        blocks with another of the same pass.
        """
        wrong: set[str] = set()
        while True:
            for runner in self.runners:
                runner.write_step(num_computed, inputs, wrong)
            now_wrong = {
                request_id
                for request_id in inputs
                if request_id not in wrong
                and not all(
                    runner.check(request_id, self.sequence(request_id), num_computed[request_id])
                    for runner in self.runners
                )
            }
            assert now_wrong <= may_be_wrong, f"{now_wrong - may_be_wrong} read KV that is not their own"
            if not now_wrong:
                return wrong
            wrong |= now_wrong

    def _check_positions(self, output, num_computed: dict[str, int]) -> None:
        """Checks positions: tpu-inference appends the previous step's token to each request that is in both steps."""
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request_id, end in self._ends_before.items():
            assert not self.is_async or request_id in resumed or num_computed.get(request_id, end) == end, request_id
        self._ends_before = {
            request_id: num_computed[request_id] + num_scheduled
            for request_id, num_scheduled in output.num_scheduled_tokens.items()
        }

    def _holds(self, request_id: str, block_ids: set[int]) -> bool:
        return any(runner.holds(request_id, block_ids) for runner in self.runners)

    def _sample(self, request_id: str, prefix: Prefix, num_drafts: int, *, wrong: bool) -> list[int]:
        if self.requests[request_id].is_prefill_chunk:
            return []
        first = len(prefix.tokens) - num_drafts
        if wrong:
            return [VOCABULARY + 3]  # occurs in no sequence
        tokens = [next_token(prefix.digests[first - 1])]
        for i, draft in enumerate(prefix.tokens[first:]):
            if draft != tokens[-1]:
                break
            tokens.append(next_token(prefix.digests[first + i]))
        return tokens
