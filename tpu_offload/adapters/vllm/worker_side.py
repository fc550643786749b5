"""The worker side of the connector: an `OffloadWorker` beside tpu-inference's model runner.

The order of calls in a step, from vLLM's connector mixin for model runners:

    bind            before the forward pass
    start_loads     before the pass if the pass needs a load, else after it, where it delays nothing
    start_saves     after the pass
    take_...        what is reported to vLLM

A load that was dispatched after the pass precedes all later passes in program order, so its request is reported as soon
as the last write is dispatched: it can be in the next pass. `OffloadWorker` reports the job to the library's scheduler
when the copy has ended.

When a load destroys the KV caches, new ones are made, and every block is reported to vLLM as invalid, once, with the
current step. vLLM alone looks only at tokens computed before a step. If the load was dispatched after the pass, the KV
that this pass computed is lost as well, though its tokens are right. `SchedulerSide.invalidate_blocks` handles that,
and the steps in flight, so the next step needs no further report.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax

from tpu_offload import (
    CachesLostError,
    CopyJob,
    JobKind,
    JobResult,
    JobState,
    KVLayout,
    OffloadConfig,
    OffloadWorker,
    StepPlan,
    StepReport,
)
from tpu_offload.adapters.vllm.cache_layout import describe_caches
from tpu_offload.adapters.vllm.grammar_rows import GrammarRows
from tpu_offload.adapters.vllm.hbm import check_worker_hbm
from tpu_offload.adapters.vllm.messages import PlanMessage, PlanMessages, ReportMessage, ReportMessages
from tpu_offload.adapters.vllm.prompt_logprobs import PromptLogprobs
from tpu_offload.adapters.vllm.ranks import RankMessages
from tpu_offload.adapters.vllm.runner_tokens import RunnerTokens
from tpu_offload.adapters.vllm.settings import (
    check_ranks,
    check_workers,
    count_hosts,
    holder_id,
    num_stages,
    read_config,
    state_groups,
)
from tpu_offload.adapters.vllm.stage_outputs import StageOutputs
from tpu_offload.types import STORAGE_WRITES
from tpu_offload.worker.arrays import renew

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_logger = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.002
_IDLE_POLL_S = 0.0001


@final
class WorkerSide:
    """The worker side. All calls come from the thread that runs the model."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._runner: Any = None
        self._worker: OffloadWorker | None = None
        self._worker_id = 0
        self._layout: KVLayout | None = None
        self._structure = jax.tree.structure(())  # of the runner's caches
        self._tokens: RunnerTokens | None = None
        self._stage: StageOutputs | None = None  # only of a pipeline stage
        self._patches: list[PromptLogprobs | GrammarRows] = []
        self._message = PlanMessage(plan=StepPlan(step_id=0), idle=False)
        self._plan = StepPlan(step_id=0)
        self._idle = False
        # Loads in flight that have not been reported to vLLM, and those that have been, whose result is outstanding.
        self._unreported_loads: dict[int, CopyJob] = {}
        self._reported_loads: dict[int, CopyJob] = {}
        self._background_job_ids: set[int] = set()  # those that vLLM waits for; a step has computed on the others
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._has_groups = False  # several KV cache groups: vLLM cannot compute requests again in new caches
        # vLLM takes failed loads by request, not by block: ids of blocks are not unique among groups or ranks.
        self._fails_by_request = False
        self._ranks: RankMessages | None = None  # None with one rank
        self._num_blocks = 0  # of each rank
        self._scheduler_ids: list[str] = []  # of the scheduler sides, by rank
        self._reports: list[StepReport] = []
        self._last_report = StepReport(worker_id=0, results=(), num_host_slots=())
        self._last_status: tuple[Any, ...] = ()
        self._needs_reset = False
        self._computed_on_invalid = False
        # The last plan whose step may compute on invalid blocks.
        self._last_invalid_step_id = -1
        self._num_steps_ahead = 0

    def register(self, runner: Any) -> None:
        """Creates the worker for a runner's caches.

        Called again if a second engine in the process is created before the first is shut down.
        """
        self.close()
        vllm_config = runner.vllm_config
        config = read_config(vllm_config, runner.kv_cache_config)
        check_workers(count_hosts(), num_processes=jax.process_count())
        # A layer with a state has a tuple of arrays; the library has a list of arrays.
        caches, self._structure = jax.tree.flatten(runner.kv_caches)
        layout = describe_caches(runner)
        check_ranks(vllm_config, layout.num_ranks)
        # With pipeline parallelism each stage is the only process of its JAX cluster.
        is_stage = num_stages(vllm_config) > 1
        self._worker_id = runner.rank if is_stage else _process_index()
        holder = holder_id(vllm_config, self._worker_id)
        # Kept at once: if something below raises, `close` has to find it.
        self._worker = worker = OffloadWorker(config, layout, caches, worker_id=self._worker_id, holder_id=holder)
        self._num_blocks = caches[layout.groups[0].layer_ids[0]].shape[0] // layout.num_ranks
        try:
            check_worker_hbm(worker, runner, config, layout, num_blocks=self._num_blocks)
        except BaseException:
            self.close()
            raise
        self._runner = runner
        self._tokens = RunnerTokens(
            runner,
            restore=config.patch_runner,
            block_size=layout.block_size,
            state_groups=state_groups(runner.kv_cache_config),
        )
        self._stage = StageOutputs(runner) if is_stage else None
        self._patches = [PromptLogprobs(runner), GrammarRows(runner)] if config.patch_runner else []
        # With async scheduling and pipeline stages, further plans are made before a failure reaches the scheduler.
        self._num_steps_ahead = vllm_config.max_concurrent_batches - 1
        self._last_invalid_step_id = -1
        self._layout = layout
        self._has_groups = len(layout.groups) > 1
        self._fails_by_request = self._has_groups or layout.num_ranks > 1
        self._ranks = RankMessages(layout.num_ranks) if layout.num_ranks > 1 else None
        self._cache_layouts = [cache.format.layout for cache in caches]
        self._last_status = ()
        self._log_registered(config, layout, worker)

    def _log_registered(self, config: OffloadConfig, layout: KVLayout, worker: OffloadWorker) -> None:
        states = ""
        if layout.state_group is not None:
            nbytes = layout.state_group.block_nbytes // layout.num_shards
            states = f", states of {nbytes} bytes per device, {worker.num_host_states} in the host tier"
        _logger.info(
            "blocks of %d tokens and %d bytes per device, %d chunks (%d tokens) in the host tier%s, %s saved, saves "
            "%s, loads %s, storage: %s",
            layout.block_size,
            layout.block_nbytes_per_device,
            worker.num_host_chunks,
            worker.num_host_chunks * config.blocks_per_chunk * layout.block_size,
            states,
            "prompts and answers are" if config.decode_save else "prompts are",
            config.save_path.value,
            config.load_path.value,
            ", ".join(config.storage_tier) or "none",
        )

    @property
    def worker(self) -> OffloadWorker:
        """The library's worker; requires `register`."""
        assert self._worker is not None, "no model runner has been registered"
        return self._worker

    def serves(self, vllm_config: "VllmConfig") -> bool:
        """Whether this process has made it, for this engine; for any as long as no runner is registered."""
        if os.getpid() != self._process_id:
            return False
        return self._runner is None or self._runner.vllm_config.instance_id == vllm_config.instance_id

    def bind(self, messages: PlanMessages) -> None:
        """Takes the plan, before the forward pass, which may use the blocks of loads that the plan cancels.

        Nothing writes to these blocks any more: only `start_loads` dispatches the rest of a load, and it drops them.
        """
        of_ranks = messages.requests_meta
        self._scheduler_ids = [message.scheduler_id for message in of_ranks]
        message = self._ranks.merge(of_ranks) if self._ranks is not None else of_ranks[0]
        self._message, self._plan, self._idle = message, message.plan, message.idle
        if self._tokens is not None:
            self._tokens.finish(message.finished_req_ids)
        for job_id in message.plan.cancelled_job_ids:
            job = self._unreported_loads.pop(job_id, None)
            if job is not None:
                self._fail(job)
        if message.invalid_block_ids:
            self._invalidate(message.invalid_block_ids)

    def start_loads(self) -> None:
        """Dispatches the loads. Those that the next pass needs are written or have failed when this returns."""
        plan = self._plan
        if self.worker.has_begun(plan):  # a duplicate message: nothing of it is repeated
            self._plan = StepPlan(step_id=plan.step_id)
            return
        self._background_job_ids |= self._message.background_job_ids
        if not self._runner.kv_caches:
            plan = self._plan = self._without_caches(plan)
        loads = plan.of(JobKind.LOAD)
        self._unreported_loads.update((job.job_id, job) for job in loads)
        needed = {job.job_id for job in loads} - self._message.background_job_ids
        begun = self._with_caches(lambda caches: self.worker.begin_step(plan, caches, urgent=needed))
        if not begun or self.worker.is_stale(plan):  # the worker has cancelled the rest of the plan
            self._plan = dataclasses.replace(plan, jobs=())
        if needed:
            self._collect()  # direct loads are dispatched or have failed; the host does not wait for the copies
        while not needed.isdisjoint(self._unreported_loads):  # staged ones
            self._collect(wait=True)
            self._with_caches(self.worker.resume_loads)
            self._take_written()

    def start_saves(self) -> None:
        """Dispatches the saves, unless the pass computed on invalid blocks or its results are lost.

        From the moment a request is tainted until the plans of the scheduler side leave it out, none are dispatched,
        because they may include it.
        """
        tainted = self._compare_tokens()
        if self._plan.step_id <= self._last_invalid_step_id:
            self._cancel(self._saves_of_plan, "the step computed on blocks whose load failed")
        elif not tainted <= self._message.tainted:
            self._cancel(self._saves_of_plan, "a request was computed on other tokens than vLLM has")
        else:
            self._with_caches(self._end_step)
        self._plan = StepPlan(step_id=self._plan.step_id)

    def take_finished_recving(self) -> set[str]:
        """Requests whose load has ended, successfully or not, since the last call."""
        self._collect()
        deadline_s = time.monotonic() + _IDLE_WAIT_S
        while self._idle and self._worker_is_busy() and time.monotonic() < deadline_s:
            time.sleep(_IDLE_POLL_S)
            self._collect()
        finished, self._finished_recving = self._finished_recving, set()
        return finished

    def take_failed_recving(self) -> set[str]:
        """Requests among the finished whose load has failed, since the last call; only with several groups or ranks."""
        failed, self._failed_recving = self._failed_recving, set()
        return failed

    def take_invalid_block_ids(self) -> set[int]:
        """Blocks that a load has not filled, since the last call."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def take_report(self) -> ReportMessages | None:
        """The reports for the scheduler sides; None if there is nothing new."""
        if not self._scheduler_ids:  # no plan has come yet
            return None
        reports, self._reports = self._reports, []
        layouts = () if self._layout is None else ((self._worker_id, self._layout),)
        self._layout = None
        tainted = self._tokens.take_newly_tainted() if self._tokens is not None else ()
        needs_reset, self._needs_reset = self._needs_reset, False
        computed, self._computed_on_invalid = self._computed_on_invalid, False
        timed_step_id = self._message.plan.step_id if self._message.is_timed else None
        if not (reports or layouts or tainted or needs_reset or computed or timed_step_id is not None):
            return None
        of_ranks = [tuple(reports)]
        if self._ranks is not None:
            of_ranks = self._ranks.split(reports)
        return ReportMessages(
            of_schedulers={
                scheduler_id: ReportMessage(
                    reports=own,
                    layouts=layouts,
                    tainted=tuple((t.request_id, t.block_ids) for t in tainted if t.rank in (rank, None)),
                    needs_reset=needs_reset,
                    computed_on_invalid=computed,
                    timed_step_id=timed_step_id,
                )
                for rank, (scheduler_id, own) in enumerate(zip(self._scheduler_ids, of_ranks, strict=True))
            }
        )

    def close(self) -> None:
        """Waits for copies in flight and frees the host tier."""
        worker, self._worker = self._worker, None
        while self._patches:  # before the tokens: both wrap the same method
            self._patches.pop().close()
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            tokens.close()
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()
        self._runner = None  # it holds the engine's caches and weights
        if worker is not None:
            worker.close()
        self._unreported_loads.clear()
        self._reported_loads.clear()
        self._background_job_ids.clear()
        self._finished_recving.clear()
        self._failed_recving.clear()
        self._invalid_block_ids.clear()
        self._computed_on_invalid = self._needs_reset = False
        self._reports.clear()

    def _compare_tokens(self) -> frozenset[str]:
        """Compares the tokens of this step with vLLM's. Returns the tainted requests."""
        tokens = self._tokens
        if tokens is None:
            return frozenset()
        for known in self._message.known_tokens:
            tokens.compare(known.request_id, known.first, known.token_ids)
        return tokens.tainted

    def _without_caches(self, plan: StepPlan) -> StepPlan:
        """The part of a plan that needs no KV caches; the rest ends here.

        tpu-inference has freed them for new weights, and vLLM makes steps for copies in flight.
        """
        for job in plan.of(JobKind.LOAD):
            self._fail(job)
        self._cancel([job for job in plan.jobs if not job.kind.of_storage], "the KV caches were freed")
        return dataclasses.replace(plan, jobs=tuple([job for job in plan.jobs if job.kind.of_storage]))

    @property
    def _saves_of_plan(self) -> Sequence[CopyJob]:
        """What the end of the step starts."""
        return self._plan.of(JobKind.SAVE, *STORAGE_WRITES)

    def _cancel(self, jobs: Sequence[CopyJob], error: str) -> None:
        """Reports jobs that were not started as cancelled, which is no failure to circuit breakers."""
        if jobs:
            results = tuple(JobResult(job_id=job.job_id, state=JobState.CANCELLED, error=error) for job in jobs)
            self._collect()
            self._reports.append(dataclasses.replace(self._last_report, results=results, lost_slots=()))

    def _end_step(self, kv_caches: list[jax.Array]) -> list[jax.Array]:
        self.worker.end_step(self._plan, kv_caches)
        return kv_caches

    def _with_caches(self, dispatch: Callable[[list[jax.Array]], list[jax.Array]]) -> bool:
        """Calls the library's worker with the caches. Returns False if they were lost and replaced by new ones."""
        runner = self._runner
        try:
            kv_caches = dispatch(jax.tree.leaves(runner.kv_caches))
            if kv_caches:
                runner.kv_caches = jax.tree.unflatten(self._structure, kv_caches)
        except CachesLostError as e:
            if self._has_groups:
                raise CachesLostError(
                    f"tpu_offload: {e}. The model has several KV cache groups, for which vLLM cannot compute requests "
                    "again in new caches: restart the engine"
                ) from e
            _logger.error("%s. New caches are made, and all blocks are reported to vLLM as invalid", e)
            runner.kv_caches = renew(runner.kv_caches, layouts=self._cache_layouts)
            for job in self._unreported_loads.values():
                self._mark_received(job)
            self._unreported_loads.clear()
            self._reported_loads.clear()
            self._background_job_ids.clear()
            self._invalidate(range(self._num_blocks))
            return False
        return True

    def _invalidate(self, block_ids: Iterable[int]) -> None:
        """Reports blocks as invalid on which the current step computes, and steps in flight may compute."""
        self._invalid_block_ids.update(block_ids)
        self._computed_on_invalid = True
        self._last_invalid_step_id = self._plan.step_id + self._num_steps_ahead

    def _worker_is_busy(self) -> bool:
        return self.worker.has_flights and not (self._finished_recving or self._reports)

    def _collect(self, *, wait: bool = False) -> None:
        report = self._last_report = self.worker.poll(wait=wait)
        memory = report.num_host_slots, report.num_host_segments, report.division_id
        status = memory, report.num_cache_losses, report.setup
        if report.results or report.lost_slots or status != self._last_status:
            self._last_status = status
            self._reports.append(report)
        for result in report.results:
            job, used = self._unreported_loads.pop(result.job_id, None), self._reported_loads.pop(result.job_id, None)
            if used is not None and result.state is JobState.FAILED:
                self._fail_after_use(used, result.error)
            elif job is not None and result.state is JobState.FINISHED:
                self._mark_received(job)
            elif job is not None:
                self._fail(job, result.failed_blocks)
        self._take_written()

    def _take_written(self) -> None:
        for job_id in self.worker.take_written_loads():
            job = self._unreported_loads.pop(job_id, None)
            if job is not None:
                self._reported_loads[job_id] = job
                self._mark_received(job)

    def _fail_after_use(self, job: CopyJob, error: str) -> None:
        """Handles a load that failed after steps that depend on it were dispatched.

        A device error destroys the caches, so the only such failure is a copy that reports fewer blocks than asked,
        which has not been observed. Tokens already returned cannot be recalled. Otherwise it is handled like lost
        caches, and the host tier is reset: blocks saved since may depend on these, and later loads on those.
        """
        if self._has_groups:
            raise CachesLostError(
                f"tpu_offload: the load of request {job.request_id!r:.100} failed after it was used: {error}. The "
                "model has several KV cache groups, for which vLLM cannot compute requests again: restart the engine"
            )
        _logger.error(
            "the load of request %.100r failed after it was used: %s. Tokens that it has generated may be "
            "wrong; the host tier and the prefix cache are emptied",
            job.request_id,
            error,
        )
        self._invalidate(range(self._num_blocks))
        self._needs_reset = True

    def _mark_received(self, job: CopyJob) -> None:
        if job.job_id in self._background_job_ids:  # vLLM does not wait for the others
            self._background_job_ids.discard(job.job_id)
            self._finished_recving.add(job.request_id)

    def _fail(self, job: CopyJob, positions: Sequence[int] = ()) -> None:
        """Handles a failed load.

        Args:
          job: the load.
          positions: positions in `job.block_ids` of the blocks that were not copied; empty for all.
        """
        invalid = [job.block_ids[i] for i in positions] or job.block_ids
        if self._fails_by_request:
            self._failed_recving.add(job.request_id)
        elif job.job_id in self._background_job_ids:  # nothing has computed on them
            self._invalid_block_ids.update(invalid)
        else:
            self._invalidate(invalid)
        self._mark_received(job)


def _process_index() -> int:
    """The id of a host. The runner's rank cannot be used: under Ray, tpu-inference gives every host rank 0."""
    return jax.process_index()
