"""The tokens that tpu-inference's model runner feeds, held against those that vLLM knows, and faults of it mended.

KV is kept under a hash of the tokens that vLLM knows. If the runner computed it on others, every request that finds it
answers wrongly. Two faults of tpu-inference 0.32 do that, both with async scheduling:

    A step is dispatched before the tokens of the one before it are on the host. Until they are, 0 stands in their
    place in the state of each request. `_modify_prev_results` puts them in, but only for requests that are in the
    next step. One that a step leaves out (preempted, or without a turn) keeps the 0, and goes on with it.

    A reset of running requests preempts and resumes them in one step. vLLM drops the token that is on its way to a
    request, or has taken it if it waited for that (a pause does). The runner has not, in either case: it puts the
    token in when the step has begun, over whatever is last by then. And if a request has found all of its prompt,
    the runner takes it for one that generates, and the engine ends.

Whether a runner has the first is seen from what it does, whenever a request is left out. Then the token is put in
here. Most requests that are left out have just reached their last token, so that nothing is said of it before one goes
on. One that is resumed is given the tokens that vLLM has for it, before the runner looks. What this cannot vouch for
is not saved:

    left out     a request that goes on, whose tokens were left out and could not be put in
    resumed      a request that is resumed while the runner has a token for it, and could not be given vLLM's
    compared     a request of which the runner has another token, before the end of what is saved, than vLLM
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

_logger = logging.getLogger(__name__)


@final
class RunnerTokens:
    """What one model runner feeds. All calls come from the thread that runs the model.

    Args:
      runner: tpu-inference's.
      mend: put in the tokens that it leaves out, and give those that are resumed vLLM's.
      block_size: tokens in a block.
    """

    def __init__(self, runner: Any, *, mend: bool, block_size: int) -> None:
        self._runner = runner
        self._mend = mend
        self._block_size = block_size
        self._extract = _import_extract()
        self._said: set[str] = set()
        # Requests whose KV may be of other tokens than those that it would be kept under, until their end.
        self._distrusted: set[str] = set()
        self._news: dict[str, tuple[int, ...]] = {}
        # Requests that have been left out and have not gone on: the first token that was, and whether it was put in.
        self._left_out: dict[str, tuple[int, bool]] = {}
        self._original = getattr(runner, "_modify_prev_results", None)
        if self._original is not None:
            runner._modify_prev_results = self._modify_prev_results
        self._batches = getattr(runner, "persistent_batch_manager", None)
        self._original_update = getattr(self._batches, "update_states", None)
        if self._original_update is not None:
            self._batches.update_states = self._update_states  # type: ignore[union-attr]

    def close(self) -> None:
        """Leaves the runner as it was."""
        if self._original is not None:
            del self._runner._modify_prev_results
            self._original = None
        if self._original_update is not None:
            del self._batches.update_states  # type: ignore[union-attr]
            self._original_update = self._batches = None

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
        num_same = next((i for i, (a, b) in enumerate(zip(fed, token_ids, strict=False)) if a != b), len(fed))
        if num_same < len(token_ids):
            self._distrust(request_id, first + num_same, "the model runner has other tokens than vLLM for a request")

    def _fed(self, request_id: str, first: int, end: int) -> Sequence[int]:
        """Tokens of a request that is in the batch; none if they cannot be had."""
        try:
            batch = self._runner.input_batch
            fed: list[int] = batch.token_ids_cpu[batch.req_id_to_index[request_id], first:end].tolist()
        except (AttributeError, KeyError, IndexError, TypeError):
            return ()
        return fed

    def _distrust(self, request_id: str, first: int, why: str) -> None:
        if request_id in self._distrusted:
            return
        state = getattr(self._runner, "requests", {}).get(request_id)
        self._distrusted.add(request_id)
        self._news[request_id] = tuple(state.block_ids[0][first // self._block_size :]) if state is not None else ()
        self._say_once("distrust", logging.ERROR, f"{why} ({request_id}): nothing more of it is saved")

    def _say_once(self, what: str, level: int, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.log(level, "tpu_offload: %s. This is said once", line)

    # In place of the runner's methods. No error of ours ends the engine.

    def _update_states(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own, at the beginning of each step."""
        assert self._original_update is not None
        resumed: set[str] = set()
        try:
            resumed = self._resumed(output)
            if resumed and self._mend:
                self._give_known_tokens(resumed, output.scheduled_cached_reqs.all_token_ids)
                resumed = set()
        except Exception as e:
            self._give_up(e)
        returned = self._original_update(output, *args, **kwargs)
        try:
            for request_id in output.finished_req_ids:  # another may come under the same id in this step
                self._left_out.pop(request_id, None)
            for request_id in self._left_out.keys() & output.num_scheduled_tokens.keys():
                self._go_on(request_id)
            for request_id in resumed:
                last = self._runner.requests[request_id].num_tokens - 1
                self._distrust(request_id, last, "a request was resumed before the runner had its last token")
        except Exception as e:
            self._give_up(e)
        return returned

    def _go_on(self, request_id: str) -> None:
        """A request is in a step again that was left out of one."""
        first, put_in = self._left_out.pop(request_id)
        if self._runner.requests[request_id].num_tokens <= first:
            return  # vLLM has dropped that token
        if not put_in:
            self._distrust(request_id, first, "tpu-inference left out a token of a request that a step left out")
        else:
            self._say_once(
                "mend",
                logging.WARNING,
                "tpu-inference left a token out that was on its way when its request was left out of a step; it is put "
                "in (see docs/upstream; TPU_OFFLOAD_MEND_RUNNER=0 leaves it alone)",
            )

    def _resumed(self, output: Any) -> set[str]:
        """Requests of a step that were preempted, and for which the runner has a token that it has not put in."""
        resumed: Collection[str] = output.scheduled_cached_reqs.resumed_req_ids
        results = self._runner._pre_async_results
        if not resumed or results is None:
            return set()
        return {state.req_id for _, state, _ in results.request_seq_lens if state.req_id in resumed}

    def _give_known_tokens(self, request_ids: Collection[str], known: Mapping[str, Sequence[int]]) -> None:
        states = {request_id: self._runner.requests[request_id] for request_id in request_ids}
        outputs = {request_id: known[request_id][len(state.prompt_token_ids) :] for request_id, state in states.items()}
        results = self._runner._pre_async_results
        for request_id, state in states.items():
            state.output_token_ids[:] = outputs[request_id]
        results.request_seq_lens = [row for row in results.request_seq_lens if row[1].req_id not in request_ids]
        for request_id in request_ids:
            results.placeholder_req_id_to_index.pop(request_id, None)

    def _modify_prev_results(self) -> None:
        """The runner's own, and after it what that leaves out."""
        assert self._original is not None
        try:
            results = self._runner._pre_async_results
            sampled = self._sampled(results)
            left_out = [(place, state, list(state.output_token_ids)) for place, state, row in sampled if row is None]
        except Exception as e:
            left_out = []
            self._give_up(e)
        self._original()
        try:
            # Where they have changed the runner has put them in itself.
            left_out = [(place, state, before) for place, state, before in left_out if state.output_token_ids == before]
            if left_out:
                self._put_in(results, [(place, state) for place, state, _ in left_out])
        except Exception as e:
            self._give_up(e)

    def _give_up(self, error: Exception) -> None:
        line = f"this tpu-inference does not work as expected ({error!r:.200}): no token is put in that it leaves out"
        self._say_once("unreadable", logging.ERROR, line)

    def _sampled(self, results: Any) -> list[tuple[int, Any, int | None]]:
        """Requests that sampled a token in the last step and have not ended: place there, state, row in this step."""
        rows, requests = self._runner.input_batch.req_id_to_index, self._runner.requests
        unsampled = set(results.discard_sampled_tokens_req_indices)
        return [
            (place, state, rows.get(state.req_id))
            for place, state, _ in results.request_seq_lens
            if place not in unsampled and requests.get(state.req_id) is state
        ]

    def _put_in(self, results: Any, left_out: Sequence[tuple[int, Any]]) -> None:
        possible = self._mend and self._extract is not None and not getattr(results, "is_continue_decode", False)
        sampled = None
        for place, state in left_out:
            num_placeholders, outputs = _num_placeholders(results, state), state.output_token_ids
            if not possible or any(outputs[-num_placeholders:]):
                self._leave_out(state.req_id, state.num_tokens - num_placeholders, put_in=False)
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
            outputs[len(outputs) - num_placeholders :] = sampled[place][:num_placeholders]
            self._leave_out(state.req_id, first, put_in=True)

    def _leave_out(self, request_id: str, first: int, *, put_in: bool) -> None:
        self._left_out[request_id] = first, put_in
        if self._original_update is None:  # it would not be seen to go on
            self._go_on(request_id)


def _num_placeholders(results: Any, state: Any) -> int:
    """How many zeros stand for what a request has sampled."""
    if getattr(results, "is_continue_decode", False):
        return int(results.continue_decode_max_steps)
    scheduled = results.scheduler_output
    return 1 + len(scheduled.scheduled_spec_decode_tokens.get(state.req_id, ())) if scheduled is not None else 1


def _import_extract() -> Callable[..., list[list[int]]] | None:
    """tpu-inference's function that has sampled tokens on the host; None if it has none of this name."""
    try:
        from tpu_inference.runner.utils import host_extract_sampled_tokens
    except ImportError:
        return None
    extract: Callable[..., list[list[int]]] = host_extract_sampled_tokens
    return extract
