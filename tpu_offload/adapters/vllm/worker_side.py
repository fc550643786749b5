"""The worker's half of the connector: an `OffloadWorker` beside tpu-inference's model runner.

The order of calls in a step, by vLLM's mixin for model runners:

    bind            before the forward pass
    start_loads     before it if the pass needs a load, else behind it, where it holds up nothing
    start_saves     behind it
    take_...        what vLLM is told

A load that was started behind the pass is ordered before all later passes by the device, so its request is
reported as soon as the last write is dispatched: it can be in the next pass. `OffloadWorker` reports the job
to the scheduler's books when the copy is really over.

When a load takes the caches with it there are new ones, and vLLM is told that every block is invalid, once, with the
step at hand. That would not be enough for vLLM alone, which looks only at tokens computed before a step: of a load that
was started behind the pass, what this very pass computed is lost as well, though its tokens are right. The scheduler
side (`spoil`) sees to it, and to steps on their way by then, so that nothing is left to say with the next step.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax

from tpu_offload import (
    CachesLostError,
    ConfigError,
    CopyJob,
    JobKind,
    JobResult,
    JobState,
    KVLayout,
    OffloadWorker,
    StepPlan,
    StepReport,
)
from tpu_offload.adapters.vllm.messages import PlanMessage, ReportMessage
from tpu_offload.adapters.vllm.runner_tokens import RunnerTokens
from tpu_offload.adapters.vllm.settings import check_hbm, check_workers, count_workers, read_config
from tpu_offload.worker.arrays import renew

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_logger = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.002
_IDLE_POLL_S = 0.0001


@final
class WorkerSide:
    """All calls come from the thread that runs the model."""

    def __init__(self) -> None:
        self._runner: Any = None
        self._worker: OffloadWorker | None = None
        self._worker_id = 0
        self._layout: KVLayout | None = None
        self._tokens: RunnerTokens | None = None
        self._message = PlanMessage(StepPlan(step_id=0), idle=False)
        self._plan = StepPlan(step_id=0)
        self._idle = False
        # Loads that vLLM has not been told about, and those that it has and whose result is not there yet.
        self._loading: dict[int, CopyJob] = {}
        self._told: dict[int, CopyJob] = {}
        self._in_background: set[int] = set()  # those of them that vLLM waits for; a step computes with the others
        self._received: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._reports: list[StepReport] = []
        self._last_report = StepReport(worker_id=0, results=(), num_host_chunks=0)
        self._told_news: tuple[Any, ...] = ()
        self._forget_all = False
        self._computed_on_invalid = False
        # The last plan whose steps may have computed on blocks that a failed load left as they were.
        self._last_spoilt_step_id = -1
        self._num_steps_ahead = 0

    def register(self, runner: Any) -> None:
        """Makes the worker for a runner's caches.

        A second engine in one process comes here again if it is made before the first has ended.
        """
        self.close()
        vllm_config = runner.vllm_config
        config = read_config(vllm_config, runner.kv_cache_config)
        check_workers(count_workers(), num_processes=jax.process_count())
        caches = runner.kv_caches
        if any(isinstance(cache, tuple) for cache in caches):
            raise ConfigError(
                "tpu_offload: some layers keep a state in place of a KV cache; expected attention only: run this "
                "model without the connector"
            )
        layout = KVLayout.from_caches(
            caches, block_size=vllm_config.cache_config.block_size, model=vllm_config.model_config.model
        )
        self._worker_id = _process_index()
        worker = OffloadWorker(config, layout, caches, worker_id=self._worker_id)
        from tpu_inference import utils

        check_hbm(
            utils.hbm_usage_bytes(runner.devices),
            needed=worker.hbm_nbytes,
            block_nbytes=layout.block_nbytes_per_device,
            utilization=vllm_config.cache_config.gpu_memory_utilization,
        )
        self._runner, self._worker = runner, worker
        self._tokens = RunnerTokens(runner, mend=config.mend_runner, block_size=layout.block_size)
        # With async scheduling the next plan is made before the scheduler hears of a failure.
        self._num_steps_ahead = int(vllm_config.scheduler_config.async_scheduling)
        self._last_spoilt_step_id = -1
        self._layout = layout
        self._cache_layouts = [cache.format.layout for cache in caches]
        self._told_news = ()
        _logger.info(
            "tpu_offload: blocks of %d tokens and %d bytes a device, %d chunks in the host tier, saves %s, loads %s",
            layout.block_size,
            layout.block_nbytes_per_device,
            worker.num_host_chunks,
            config.save_path.value,
            config.load_path.value,
        )

    @property
    def worker(self) -> OffloadWorker:
        """The library's worker; there from `register` on."""
        assert self._worker is not None, "no model runner has been registered"
        return self._worker

    def serves(self, vllm_config: "VllmConfig") -> bool:
        """Whether the registered runner is of this engine; with no runner, whether it is nobody's."""
        return self._runner is None or self._runner.vllm_config.instance_id == vllm_config.instance_id

    def bind(self, message: PlanMessage) -> None:
        """Before the forward pass, which may use the blocks of loads that the plan takes back.

        They are not written any more: what is still to be written is dispatched by `start_loads` only, which drops it.
        """
        self._message, self._plan, self._idle = message, message.plan, message.idle
        if self._tokens is not None:
            self._tokens.finish(message.finished)
        for job_id in message.plan.cancelled_job_ids:
            job = self._loading.pop(job_id, None)
            if job is not None:
                self._fail(job)
        if message.spoilt_block_ids:
            self._spoil(message.spoilt_block_ids)

    def start_loads(self) -> None:
        """Dispatches the loads; those that the coming pass needs are written when it returns, or have failed."""
        plan = self._plan
        if self.worker.has_begun(plan):  # a message that came twice: nothing of it is done again
            self._plan = StepPlan(step_id=plan.step_id)
            return
        loads = plan.of(JobKind.LOAD)
        self._loading.update((job.job_id, job) for job in loads)
        self._in_background |= self._message.background_job_ids
        needed = {job.job_id for job in loads} - self._message.background_job_ids
        begun = self._run(lambda caches: self.worker.begin_step(plan, caches, urgent=needed))
        if not begun or self.worker.is_stale(plan):  # the worker has cancelled the saves, and wants no more of the plan
            self._plan = dataclasses.replace(plan, jobs=())
        if needed:
            self._collect()  # direct loads are written, or have failed: nothing waits for the copies themselves
        while not needed.isdisjoint(self._loading):  # staged ones
            self._collect(wait=True)
            self._run(self.worker.resume_loads)
            self._take_written()

    def start_saves(self) -> None:
        """Dispatches the saves, unless the pass ran on blocks that a failed load has left as they were, or is lost.

        Nor are there any from when a request has turned out to rest on other tokens than vLLM has, for it may be among
        them, until the scheduler side makes its plans without it.
        """
        distrusted = self._compare_tokens()
        if self._plan.step_id <= self._last_spoilt_step_id:
            self._cancel_saves("the step computed on blocks whose load failed")
        elif not distrusted <= self._message.distrusted:
            self._cancel_saves("a request was computed on other tokens than vLLM has for it")
        else:
            self._run(self._end)
        self._plan = StepPlan(step_id=self._plan.step_id)

    def take_received(self) -> set[str]:
        """Requests whose load has ended, well or not, since the last call."""
        self._collect()
        deadline_s = time.monotonic() + _IDLE_WAIT_S
        while self._idle and self._worker_is_busy() and time.monotonic() < deadline_s:
            time.sleep(_IDLE_POLL_S)
            self._collect()
        received, self._received = self._received, set()
        return received

    def take_invalid_block_ids(self) -> set[int]:
        """Blocks that a load should have filled and did not."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def take_report(self) -> ReportMessage | None:
        """For the scheduler's books; None when there is nothing new."""
        reports, self._reports = self._reports, []
        layout, self._layout = self._layout, None
        distrusted = tuple(self._tokens.take_news().items()) if self._tokens is not None else ()
        forget_all, self._forget_all = self._forget_all, False
        computed, self._computed_on_invalid = self._computed_on_invalid, False
        if not (reports or layout or distrusted or forget_all or computed):
            return None
        return ReportMessage(tuple(reports), layout, distrusted, forget_all, computed)

    def close(self) -> None:
        """Waits for copies in flight and frees the host tier."""
        worker, self._worker = self._worker, None
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            tokens.close()
        self._runner = None  # with it go the engine's caches and weights
        if worker is not None:
            worker.close()
        self._loading.clear()
        self._told.clear()
        self._in_background.clear()
        self._received.clear()
        self._invalid_block_ids.clear()
        self._computed_on_invalid = self._forget_all = False
        self._reports.clear()

    def _compare_tokens(self) -> frozenset[str]:
        """Requests that are not to be saved, after a look at what this step was given."""
        tokens = self._tokens
        if tokens is None:
            return frozenset()
        for known in self._message.known_tokens:
            tokens.compare(known.request_id, known.first, known.token_ids)
        return tokens.distrusted

    def _cancel_saves(self, error: str) -> None:
        """Reports the saves of the plan as cancelled: not as failed, for that would say something of the next copy."""
        saves = self._plan.of(JobKind.SAVE)
        if saves:
            results = tuple(JobResult(job_id=job.job_id, state=JobState.CANCELLED, error=error) for job in saves)
            self._collect()
            self._reports.append(dataclasses.replace(self._last_report, results=results, lost_slots=()))

    def _end(self, kv_caches: list[jax.Array]) -> list[jax.Array]:
        self.worker.end_step(self._plan, kv_caches)
        return kv_caches

    def _run(self, dispatch: Callable[[list[jax.Array]], list[jax.Array]]) -> bool:
        """Has the library's worker go on with the caches; False when they were lost and there are new ones."""
        runner = self._runner
        try:
            runner.kv_caches = dispatch(runner.kv_caches)
        except CachesLostError as e:
            _logger.error("tpu_offload: %s. New caches are made, and vLLM is told", e)
            num_blocks = runner.kv_caches[0].shape[0]
            runner.kv_caches = renew(runner.kv_caches, layouts=self._cache_layouts)
            for job in self._loading.values():
                self._receive(job)
            self._loading.clear()
            self._told.clear()
            self._in_background.clear()
            self._spoil(range(num_blocks))
            return False
        return True

    def _spoil(self, block_ids: Iterable[int]) -> None:
        """The step at hand computes on these blocks, or has, and so may those that are on their way by then."""
        self._invalid_block_ids.update(block_ids)
        self._computed_on_invalid = True
        self._last_spoilt_step_id = self._plan.step_id + self._num_steps_ahead

    def _worker_is_busy(self) -> bool:
        return self.worker.has_flights and not (self._received or self._reports)

    def _collect(self, *, wait: bool = False) -> None:
        report = self._last_report = self.worker.poll(wait=wait)
        news = report.num_host_chunks, report.num_cache_losses, report.setup
        if report.results or report.lost_slots or news != self._told_news:
            self._told_news = news
            self._reports.append(report)
        for result in report.results:
            job, told = self._loading.pop(result.job_id, None), self._told.pop(result.job_id, None)
            if told is not None and result.state is JobState.FAILED:
                self._fail_late(told, result.error)
            elif job is not None and result.state is JobState.FINISHED:
                self._receive(job)
            elif job is not None:
                self._fail(job, result.failed_blocks)
        self._take_written()

    def _take_written(self) -> None:
        for job_id in self.worker.take_written_loads():
            job = self._loading.pop(job_id, None)
            if job is not None:
                self._told[job_id] = job
                self._receive(job)

    def _fail_late(self, job: CopyJob, error: str) -> None:
        """A load went wrong on the device, after steps that rest on it were dispatched.

        An error of the device takes the caches along. What is left is a copy that says it did less than it was asked
        to, which nobody has seen. Tokens that are out stay out. All else is as if the caches were lost, and the host
        tier is reset, for what was saved since may rest on these blocks, and what was loaded since on that.
        """
        _logger.error(
            "tpu_offload: the load of request %s failed after it was used: %s. Tokens that it has generated may be "
            "wrong; all KV that is kept is dropped",
            job.request_id,
            error,
        )
        self._spoil(range(self._runner.kv_caches[0].shape[0]))
        self._forget_all = True

    def _receive(self, job: CopyJob) -> None:
        if job.job_id in self._in_background:  # else vLLM does not wait for it
            self._in_background.discard(job.job_id)
            self._received.add(job.request_id)

    def _fail(self, job: CopyJob, positions: Sequence[int] = ()) -> None:
        """A load brought nothing, or all but the blocks at these positions of it: what is before them is used."""
        invalid = [job.block_ids[i] for i in positions] or job.block_ids
        if job.job_id in self._in_background:  # nothing has computed on them
            self._invalid_block_ids.update(invalid)
        else:
            self._spoil(invalid)
        self._receive(job)


def _process_index() -> int:
    """Which worker this is. Not the runner's rank: under Ray tpu-inference gives rank 0 to every host."""
    return jax.process_index()
