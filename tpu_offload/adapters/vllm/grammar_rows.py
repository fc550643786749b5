"""Gives tpu-inference's structured decoding the masks of a grammar in the order in which it reads them.

vLLM's `GrammarOutput` has one row of the bitmask for each request, in the order of its list of requests, which is that
of scheduling. tpu-inference 0.32 sorts the ids and takes the rows one after the other, so requests get each other's
masks when they are not scheduled in the order of their ids, such as "10" after "9". They generate tokens that their
grammar rejects, and end with an error, or with an answer of the wrong form.

`GrammarRows` sorts the list and the rows together, which a runner without the defect reads in the same way.
docs/upstream has the change to tpu-inference.
"""

import dataclasses
import logging
from typing import Any, final

_logger = logging.getLogger(__name__)


@final
class GrammarRows:
    """The grammar masks of one model runner. All calls come from the thread that runs the model.

    Args:
      runner: tpu-inference's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._has_failed = False
        self._manager = getattr(runner, "structured_decoding_manager", None)
        self._original = getattr(self._manager, "prepare_structured_decoding_input", None)
        if self._original is not None:
            self._manager.prepare_structured_decoding_input = self._prepare  # type: ignore[union-attr]

    def close(self) -> None:
        """Restores the manager's own method."""
        if self._original is not None:
            del self._manager.prepare_structured_decoding_input  # type: ignore[union-attr]
            self._original = self._manager = None

    # This replaces a method of the runner's manager. Errors in the workaround must not end the engine.

    def _prepare(self, logits: Any, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._original is not None
        try:
            grammar_output = self._sorted(grammar_output)
        except Exception as e:
            self._log_incompatible(e)
        return self._original(logits, grammar_output, *args, **kwargs)

    def _sorted(self, output: Any) -> Any:
        """The same masks, by request id, and only of requests in the batch: a row of another one is not skipped."""
        ids, in_batch = output.structured_output_request_ids, self._runner.input_batch.req_id_to_index
        if len(output.grammar_bitmask) != len(ids):  # several rows for a request with drafts
            return output
        order = sorted((i for i in range(len(ids)) if ids[i] in in_batch), key=ids.__getitem__)
        num_drafts = output.num_acceptable_drafts
        return dataclasses.replace(
            output,
            structured_output_request_ids=[ids[i] for i in order],
            grammar_bitmask=output.grammar_bitmask[order],
            num_acceptable_drafts=[num_drafts[i] for i in order] if num_drafts is not None else None,
        )

    def _log_incompatible(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _logger.error(
                "the masks of structured outputs could not be sorted (%.200r); requests may get each other's. Further "
                "cases are not logged",
                error,
            )
