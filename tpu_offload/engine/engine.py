"""The engine: requests in, tokens out, one step at a time."""

import dataclasses
import logging
import time
from collections.abc import Callable

from tpu_offload import (
    BlockHash,
    BlockHasher,
    CachesLostError,
    ConfigError,
    OffloadConfig,
    OffloadStats,
    RequestError,
    TierStats,
)
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.hosts import HostOutput, HostRunner, Hosts
from tpu_offload.engine.offloading import Offloading, Seams
from tpu_offload.engine.request import FinishReason, Request, RequestOutput
from tpu_offload.engine.runner import ModelRunner, StepOutput, cache_layout
from tpu_offload.engine.scheduler import Batch, Scheduler
from tpu_offload.engine.sequence import ScheduledTokens, Sequence, sample_id

_logger = logging.getLogger(__name__)

_SETTLE_S = 0.001  # between two looks at copies, which other threads make
_MOSTLY = 0.75  # a step counts as prefill for rate measurements from this share of prompt tokens on


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of the engine since its start.

    Attributes:
      num_steps: calls of `Engine.step`.
      num_preemptions: preemptions of running requests.
      num_waiting: samples of requests that hold no blocks now.
      num_active: samples of requests that hold blocks now.
      num_swapped: waiting samples whose KV is swapped out.
      num_cache_losses: failed loads that destroyed all KV in HBM.
    """

    num_steps: int
    num_preemptions: int
    num_waiting: int
    num_active: int
    num_swapped: int
    num_cache_losses: int


class Engine:
    """Serves requests on one device, or on those of several hosts. All calls come from one thread.

    Args:
      model_config: the model, with random weights.
      engine_config: sizes of the KV cache and of a step.
      offload: settings of the offload library; None serves without it.
      clock: monotonic seconds.
      seams: for tests of the offload library, on one device.
      hosts: the processes that run the model, in place of this one; they serve one engine at a time.
    Raises:
      HostError: a process of `hosts` has died, or refuses the settings; `step` and the other calls raise it too.
      ConfigError: the offload settings do not fit the layout, or are no `OffloadConfig`.
      LayoutError: the model has layers with windows and the host tier is on.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        *,
        offload: OffloadConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
        seams: Seams | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        if not isinstance(offload, OffloadConfig | None):
            raise ConfigError(f"offload is {offload!r:.60}; expected an OffloadConfig or None")
        self._vocab_size = model_config.vocab_size
        self._clock = clock
        self._runner: ModelRunner | HostRunner
        if offload is not None and not offload.enabled and offload.swap_gb == 0:
            offload = None
        if hosts is None:
            self._runner = ModelRunner(model_config, engine_config)
            layout = cache_layout(model_config, engine_config, self._runner.kv_caches)
        else:
            layout = hosts.start(model_config, engine_config, offload)
            self._runner = hosts.runner
        self._offload: Offloading | None = None
        if offload is not None:
            workers = hosts.workers if hosts is not None else None
            self._offload = Offloading(
                offload, layout, self._runner.kv_caches, clock=clock, seams=seams, workers=workers
            )
        hasher = BlockHasher(layout.fingerprint(), block_size=engine_config.block_size)
        self._scheduler = Scheduler(
            engine_config,
            hasher,
            offload=self._offload,
            windows=model_config.group_windows,
            has_states=bool(model_config.state_layers),
        )
        self._samples: dict[str, list[Sequence]] = {}  # unfinished ones, by request
        self._in_flight: _InFlight | None = None
        self._last_end_s = 0.0
        self._async_scheduling = engine_config.async_scheduling
        self._rejected: list[RequestOutput] = []
        self._num_steps = 0
        self._num_cache_losses = 0
        self._is_closed = False

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to compute or to report."""
        return bool(self._rejected or self._samples)

    def add_request(self, request: Request) -> None:
        """Queues a request. One that can never be served ends with an error in the next step.

        Raises:
          RequestError: the id is in use, or `Request.check` says why, or the engine is closed.
        """
        self._check_open("add_request")
        if not isinstance(request, Request):
            raise RequestError(f"the request is {request!r:.60}; expected a Request")
        request.check(self._vocab_size)
        taken = [request.request_id] if request.request_id in self._samples else []
        taken += filter(self._scheduler.has, (sample_id(request.request_id, i) for i in range(request.sampling.n)))
        if taken:
            raise RequestError(f"request {taken[0]} is still unfinished; choose another request_id")
        now_s = self._clock()
        samples = [Sequence(request, now_s, list(request.prompt_tokens), i) for i in range(request.sampling.n)]
        error = self._scheduler.why_unservable(request)
        if error:
            self._rejected += [s.final_output(FinishReason.ERROR, now_s=now_s, error=error) for s in samples]
        else:
            self._samples[request.request_id] = samples
            self._scheduler.add(*samples)

    def abort(self, *request_ids: str) -> list[RequestOutput]:
        """Ends requests immediately, in any phase.

        Returns:
          The last output of each of their unfinished samples; none for unknown or finished requests.
        """
        samples = [sample for request_id in dict.fromkeys(request_ids) for sample in self._samples.pop(request_id, [])]
        now_s = self._clock()
        ended = self._scheduler.finish(*(sample.sequence_id for sample in samples))
        return [sample.final_output(FinishReason.ABORTED, now_s=now_s) for sample in ended]

    def reset_cache(self) -> None:
        """Invalidates all cached KV, in HBM and in host memory; running requests continue."""
        self._scheduler.invalidate_prefixes()
        if self._offload:
            self._offload.reset()

    def step(self) -> list[RequestOutput]:
        """Dispatches one batch, and reads the tokens sampled by it, or with `async_scheduling` by the previous one.

        Returns:
          One output for each sample that got a token or ended.
        Raises:
          RequestError: the engine is closed.
        """
        self._check_open("step")
        self._num_steps += 1
        outputs, self._rejected = self._rejected, []
        batch = self._scheduler.schedule()
        launched = self._launch(batch)
        if self._async_scheduling:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            outputs += self._complete(launched)
        if self._offload:
            # With nothing to compute, only copies can make progress.
            idle = not batch and self._in_flight is None
            update = self._offload.poll(wait=idle and self._scheduler.awaits_copies)
            for name in update.loaded:
                self._scheduler.end_load(name)
            for failed in update.failed_loads:
                self._scheduler.end_load(failed.request_id, num_valid_tokens=failed.num_valid_tokens)
            for name in update.swapped_in:
                self._scheduler.end_swap_in(name)
            for name in update.lost_swaps:
                self._scheduler.lose_swap(name)
        return outputs

    def warm_up(self) -> None:
        """Compiles the step programs, so that no request waits for it."""
        self._runner.warm_up(self._offload.fused_shapes() if self._offload else ())

    def wait_for_host_memory(self) -> None:
        """Blocks until host tier and swap pool are allocated, which otherwise happens while requests are served.

        For measurements and tests: memory is pinned at a few GB/s.
        """
        if self._offload:
            self._offload.wait_until_allocated()

    def settle(self) -> None:
        """Steps an engine without requests until no copy is in flight, so that storage has all that it will get."""
        while self._offload and self._offload.has_jobs:
            self.step()
            time.sleep(_SETTLE_S)

    def stored_block_hashes(self) -> frozenset[BlockHash]:
        """Of each chunk in a storage tier, the hash of its last block; empty without one."""
        return self._offload.stored_block_hashes() if self._offload else frozenset()

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counts."""
        scheduler = self._scheduler
        return EngineStats(
            self._num_steps,
            scheduler.num_preemptions,
            scheduler.num_waiting,
            scheduler.num_active,
            scheduler.num_swapped,
            self._num_cache_losses,
        )

    def offload_stats(self) -> OffloadStats | None:
        """A snapshot of the offload library's counts; None without it."""
        return self._offload.stats() if self._offload else None

    def tier_stats(self) -> tuple[TierStats, ...]:
        """A snapshot of the counts of each storage tier, nearest first."""
        return self._offload.tier_stats() if self._offload else ()

    def check_invariants(self) -> None:
        """Raises AssertionError if any bookkeeping disagrees. For tests."""
        self._scheduler.check_invariants()
        if self._offload:
            self._offload.check_invariants()

    def close(self) -> None:
        """Waits for copies in flight and frees the host tier. Afterwards only statistics can be read."""
        if self._offload and not self._is_closed:
            self._offload.close()
        self._is_closed = True

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise RequestError(
                f"{call}() of an engine that is closed; expected no request after close(): make a new Engine"
            )

    def _launch(self, batch: Batch) -> "_InFlight | None":
        """Dispatches swaps, loads, forward pass and saves in this order.

        Returns:
          The step; None if there is nothing to compute, or a load destroyed the caches.
        """
        runner, offload = self._runner, self._offload
        start_s = self._clock()
        spans = [self._token_span(scheduled) for scheduled in batch]
        copies = self._scheduler.take_copies()
        if offload is None:
            runner.copy_blocks(copies)
            output = runner.step(spans) if spans else None
        else:
            try:
                plan, runner.kv_caches = offload.before_forward(batch, runner.kv_caches)
            except CachesLostError as e:
                self._restart(batch, e)
                return None
            runner.copy_blocks(copies)
            output = runner.step(spans, offload.fused_step()) if spans else None
            offload.after_forward(plan, runner.kv_caches, output.copied if output else None)
        return _InFlight(batch, output, start_s) if output else None

    def _restart(self, batch: Batch, error: CachesLostError) -> None:
        """Makes new, empty caches. A step in flight was dispatched before the loss, and its tokens count."""
        self._num_cache_losses += 1
        self._runner.renew_caches()
        num_lost = self._scheduler.mark_caches_lost(batch)
        _logger.error("%s. New caches were made; %d requests are recomputed", error, num_lost)

    def _complete(self, step: "_InFlight") -> list[RequestOutput]:
        """Waits for the tokens of a step, and returns their outputs."""
        num_spans = len(step.batch)
        tokens, logprobs = (values[:num_spans].tolist() for values in step.output.read())
        now_s = self._clock()
        if self._offload:
            # With async scheduling the step before was still running when this one was dispatched.
            self._observe_prefill(step.batch, now_s - max(step.start_s, self._last_end_s))
            self._last_end_s = now_s
        outputs = []
        for sample in self._scheduler.complete(step.batch, zip(tokens, logprobs, strict=True), now_s=now_s):
            reason = sample.finish_reason()
            if reason is None:
                outputs.append(sample.output())
            else:
                self._scheduler.finish(sample.sequence_id)
                outputs.append(sample.final_output(reason, now_s=now_s))
                samples = self._samples[sample.request_id]
                samples.remove(sample)
                if not samples:
                    del self._samples[sample.request_id]
        return outputs

    def _observe_prefill(self, batch: Batch, seconds: float) -> None:
        """Reports the prefill rate, measured on steps that compute mostly prompts."""
        assert self._offload is not None
        num_tokens = sum(scheduled.num_tokens for scheduled in batch)
        num_prompt = sum(scheduled.num_tokens for scheduled in batch if scheduled.num_tokens > 1)
        if num_prompt >= _MOSTLY * num_tokens:
            num_attended = sum(s.num_tokens * (s.start + s.end) / 2 for s in batch if s.num_tokens > 1)
            self._offload.observe_prefill(num_prompt, seconds, num_attended)

    def _token_span(self, scheduled: ScheduledTokens) -> TokenSpan:
        sequence = scheduled.sequence
        tokens = sequence.tokens[scheduled.start : scheduled.end]
        source = -1
        if len(tokens) < scheduled.num_tokens:  # the last one is in flight, and taken from there on the device
            assert self._in_flight is not None, "a token is in flight but no step"
            rows = (row for row, other in enumerate(self._in_flight.batch) if other.sequence is sequence)
            source = next(rows)
            tokens = [*tokens, 0]
        return TokenSpan(
            tokens,
            scheduled.start,
            sequence.block_tables,
            sequence.sampling,
            last_row=source,
            state_rows=scheduled.state_rows,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    """A dispatched step and its future results."""

    batch: Batch
    output: StepOutput | HostOutput
    start_s: float
