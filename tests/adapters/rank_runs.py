"""Runs of `llm_runs` with data-parallel ranks: each rank has a scheduler in a process of its own, forked by vLLM."""

from typing import Any

from tests.adapters import llm_runs

_QUESTIONS = {"state": lambda scheduler: llm_runs.state_of(scheduler) | {"num_preemptions": scheduler.num_preemptions}}


def install_probes() -> None:
    """Has schedulers count preemptions and answer questions, in processes that are forked from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make_stats, preempt = Scheduler.make_stats, Scheduler._preempt_request

    def answer(self: Any, question: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(question, str):
            return _QUESTIONS[question](self)
        return make_stats(self, question, *args, **kwargs)

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_preemptions += 1
        return preempt(self, *args, **kwargs)

    Scheduler.num_preemptions = 0
    Scheduler.make_stats, Scheduler._preempt_request = answer, count


def states_of_ranks(scheduler: Any) -> list[dict[str, Any]]:
    """The state of the scheduler of each rank of a `DPScheduler`."""
    from tpu_inference.core.sched.dp_scheduler import SchedulerCommand

    ranks = range(scheduler.dp_size)
    for rank in ranks:
        scheduler._send_command(rank, SchedulerCommand.MAKE_STATS, ("state", None))
    return [scheduler._get_result(rank) for rank in ranks]


class RankedSteps(llm_runs.EngineRun):
    """What an engine with ranks does in other ways than one without: its schedulers are in other processes.

    What steps return of the schedulers is a list, by rank.
    """

    def _watch(self) -> None:
        pass

    def drain(self) -> dict[str, Any]:
        """Serves short prompts until no scheduler waits for a copy: it learns of results with its next request."""
        for number in range(50):
            state = self.state()
            if not any(rank.get("has_jobs") for rank in state["ranks"]):
                break
            self.generate([[3 + number, 5 + rank] for rank in range(len(state["ranks"]))], max_tokens=2)
        return state

    def state(self) -> dict[str, Any]:
        """The state of each scheduler, and of the workers."""
        return {"ranks": states_of_ranks(self._scheduler)} | self._worker_state()

    def drive_and_abort(self, prompts: list[list[int]], after: int, **sampling: Any) -> None:
        """Aborts all requests after some steps."""
        engine = self._llm.llm_engine
        ids = [self._add_request(prompt, sampling)[0] for prompt in prompts]
        for _ in range(after):
            engine.step()
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()

    def drive_and_pause(self, prompts: list[list[int]], after: int, **sampling: Any) -> dict[str, Any]:
        """Pauses after some steps, clears all caches, as for new weights, and goes on.

        As a served engine does, it goes on with steps until it has no work, and clears then.
        """
        from vllm.v1.core.sched.interface import PauseState

        engine, tokens, num_paused = self._llm.llm_engine, dict[str, list[int]](), 0
        ids = [self._add_request(prompt, sampling)[0] for prompt in prompts]
        for number in range(llm_runs.STEP_LIMIT):
            if number == after:
                self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
                while self._scheduler.has_requests() or self._core.batch_queue:
                    self._core.step_fn()
                    num_paused += 1
                self._core.pause_scheduler("keep", clear_cache=True)
                self._core.resume_scheduler()
            tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
            if not engine.has_unfinished_requests():
                break
        return {"tokens": [tokens[name] for name in ids], "num_paused": num_paused}

    def drive_and_reset(self, prompts: list[list[int]], after: int, **sampling: Any) -> dict[str, Any]:
        """Resets with all running requests after some steps, and goes on. Returns the error of the reset."""
        engine, tokens, error = self._llm.llm_engine, dict[str, list[int]](), ""
        ids = [self._add_request(prompt, sampling)[0] for prompt in prompts]
        for number in range(llm_runs.STEP_LIMIT):
            if number == after:
                try:
                    self._llm.reset_prefix_cache(reset_running_requests=True)
                except Exception as e:
                    error = str(e)
            tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
            if not engine.has_unfinished_requests():
                break
        return {"tokens": [tokens[name] for name in ids], "error": error}


class RankedRun(RankedSteps):
    """One engine."""

    @property
    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    def _worker_state(self) -> dict[str, Any]:
        return llm_runs.state_of_worker(self.worker) if self.connector is not None else {}

    def confuse_ranks(self) -> None:
        """Plants the fault that every rank copies to and from the places of the first."""
        from tests.inside.worker import change_ranks, tier_groups

        for copies in tier_groups(self.worker):
            change_ranks(copies, lambda ranks: 0 * ranks)
