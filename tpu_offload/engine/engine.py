"""The engine: requests in, tokens out, one step at a time."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from tpu_offload import BlockHasher, KVLayout, OffloadConfig, OffloadStats, RequestError
from tpu_offload.engine.batch import TokenRun
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.offloading import Offloading
from tpu_offload.engine.request import FinishReason, Request, RequestOutput
from tpu_offload.engine.runner import ModelRunner
from tpu_offload.engine.scheduler import Scheduler
from tpu_offload.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts over the engine's life.

    Attributes:
      num_steps: calls of `Engine.step`.
      num_preemptions: how often a running request gave its blocks back.
      num_waiting: requests that hold no blocks now.
      num_active: requests that hold blocks now.
    """

    num_steps: int
    num_preemptions: int
    num_waiting: int
    num_active: int


class Engine:
    """Serves requests on one device. All calls come from one thread.

    Args:
      model_config: the model, with random weights.
      engine_config: sizes of the KV cache and of a step.
      offload: settings of the offload library; None serves without it.
      clock: monotonic seconds.
    Raises:
      ConfigError: the offload settings do not fit the layout.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        *,
        offload: OffloadConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._vocab_size = model_config.vocab_size
        self._clock = clock
        self._runner = ModelRunner(model_config, engine_config)
        layout = KVLayout.from_caches(
            self._runner.kv_caches, block_size=engine_config.block_size, model=model_config.name
        )
        self._offload: Offloading | None = None
        if offload is not None and offload.enabled:
            self._offload = Offloading(offload, layout, self._runner.kv_caches, clock=clock)
        hasher = BlockHasher(layout.fingerprint(), block_size=engine_config.block_size)
        self._scheduler = Scheduler(engine_config, hasher, offload=self._offload)
        self._rejected: list[RequestOutput] = []
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._rejected or self._scheduler.num_waiting or self._scheduler.num_active)

    def add_request(self, request: Request) -> None:
        """Queues a request. One that can never be served ends with an error in the next step.

        Raises:
          RequestError: a request of this id is unfinished, a token is not in the vocabulary, or the
            cache_salt is no valid text.
        """
        if self._scheduler.has(request.request_id):
            raise RequestError(f"request {request.request_id} is still unfinished; choose another request_id")
        strange = [token for token in request.prompt_tokens if not 0 <= token < self._vocab_size]
        if strange:
            raise RequestError(
                f"request {request.request_id} has token {strange[0]}; expected 0 to {self._vocab_size - 1}"
            )
        try:
            request.cache_salt.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"request {request.request_id} has a cache_salt that is no valid text: {e}") from e
        sequence = Sequence(request, self._clock(), tokens=list(request.prompt_tokens))
        error = self._scheduler.why_unservable(request)
        if error:
            self._rejected.append(sequence.final_output(FinishReason.ERROR, now_s=self._clock(), error=error))
        else:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once, whatever it is doing.

        Returns:
          Its last output; None if there is no such request, or no more.
        """
        if not self._scheduler.has(request_id):
            return None
        return self._scheduler.finish(request_id).final_output(FinishReason.ABORTED, now_s=self._clock())

    def step(self) -> list[RequestOutput]:
        """Computes one batch.

        Returns:
          One output for each request that got a token or ended.
        """
        self._num_steps += 1
        outputs, self._rejected = self._rejected, []
        batch = self._scheduler.schedule()
        sampled = self._run(batch)
        now_s = self._clock()
        for sequence in self._scheduler.complete(batch, sampled, now_s=now_s):
            reason = sequence.finish_reason()
            if reason is None:
                outputs.append(sequence.output())
            else:
                self._scheduler.finish(sequence.request_id)
                outputs.append(sequence.final_output(reason, now_s=now_s))
        if self._offload:
            # With nothing to compute, the only news can come from a load.
            update = self._offload.poll(wait=not batch and self._scheduler.num_loading > 0)
            for request_id in update.loaded:
                self._scheduler.end_load(request_id)
            for failed in update.failed_loads:
                self._scheduler.end_load(failed.request_id, num_valid_tokens=failed.num_valid_tokens)
        return outputs

    def warm_up(self) -> None:
        """Compiles the step programs, so that no request waits for it."""
        self._runner.warm_up(self._offload.fused_shapes() if self._offload else ())

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counts."""
        scheduler = self._scheduler
        return EngineStats(self._num_steps, scheduler.num_preemptions, scheduler.num_waiting, scheduler.num_active)

    def offload_stats(self) -> OffloadStats | None:
        """A snapshot of the offload library's counts; None without it."""
        return self._offload.stats() if self._offload else None

    def check_invariants(self) -> None:
        """Raises AssertionError if any bookkeeping disagrees. For tests."""
        self._scheduler.check_invariants()
        if self._offload:
            self._offload.check_invariants()

    def close(self) -> None:
        """Waits for copies in flight and frees the host tier. The engine cannot be used after it."""
        if self._offload:
            self._offload.close()

    def _run(self, batch: list[tuple[Sequence, int]]) -> list[int]:
        """Dispatches loads, forward pass and saves in this order, then waits for the sampled tokens."""
        runner, offload = self._runner, self._offload
        runs = [_token_run(sequence, num_tokens) for sequence, num_tokens in batch]
        if offload is None:
            output = runner.step(runs) if runs else None
        else:
            plan, runner.kv_caches = offload.before_forward(batch, runner.kv_caches)
            output = runner.step(runs, offload.fused_step()) if runs else None
            offload.after_forward(plan, runner.kv_caches, output.copied if output else None)
        return np.asarray(output.tokens)[: len(runs)].tolist() if output else []


def _token_run(sequence: Sequence, num_tokens: int) -> TokenRun:
    start = sequence.num_computed_tokens
    tokens = sequence.tokens[start : start + num_tokens]
    return TokenRun(tokens, start, sequence.block_ids, sequence.request.sampling)
