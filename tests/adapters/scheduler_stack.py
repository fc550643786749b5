"""The real vLLM scheduler over the real connector, in both roles, and a model whose KV is a hash of the tokens.

Real are vLLM's scheduler, KV cache manager, connector mixin and output aggregator, the connector, and the library's
scheduler and workers, which copy between jax arrays. The model is a fake: the KV of a position is a hash of all tokens
up to it, so that tests can identify the contents of a block, and so is the next token. Before each pass the model
checks every byte that attention would read.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tpu_inference import utils as tpu_utils
from tpu_inference.core.hybrid_coordinator import TPUKVCacheManager, tpu_get_kv_cache_coordinator
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.adapters.engine_config import EOS, kv_cache_config, make_config
from tests.adapters.hashed_model import BLOCK_SIZE, NUM_LAYERS, VOCABULARY, Prefix
from tests.adapters.hashed_passes import Passes
from tests.adapters.hashed_runner import Runner
from tests.inside.connector import connector_scheduler, event_sources, invalid_block_ids, open_loads
from tests.inside.scheduler import request_table
from tests.inside.worker import tier_group, tier_groups
from tpu_offload.adapters.vllm import worker_side
from tpu_offload.adapters.vllm.messages import ReportMessage, ReportMessages
from tpu_offload.adapters.vllm.scheduler_side import SchedulerSide
from tpu_offload.kernels import Copier
from tpu_offload.kernels.staged import StagedCopier
from tpu_offload.types import Direction

GB = 2**30


class Stack:
    """One engine: a scheduler and its workers.

    Args:
      num_workers: each has all layers, with contents of its own.
      num_stages: of a pipeline. Every second one has fewer layers, and there are as many workers.
      guess: for speculative decoding, returns whether the next draft is right.
      windows: of consecutive layers, which repeat: 0 for full attention, else the sliding window in tokens. Each is a
        KV cache group of its own.
      mixed_heads: half of the layers have wider pages, in the one group of full attention.
      num_rows: for states; without any, the model has none.
      retention_interval: at which boundaries vLLM keeps states and windows in its prefix cache, see its
        `prefix_cache_retention_interval`.
      clock: of the scheduler side, and with it of the library's scheduler.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 24,
        num_workers: int = 1,
        num_stages: int = 1,
        guess=lambda: True,
        windows: Sequence[int] = (0,),
        mixed_heads: bool = False,
        num_rows: int = 0,
        retention_interval: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **kwargs,
    ) -> None:
        init_none_hash(sha256)
        if "storage_tier" in kwargs:  # else the time that the test itself takes decides what is loaded
            kwargs.setdefault("load_mode", "load")
        self.config = make_config(num_blocks=num_blocks, num_rows=num_rows, num_stages=num_stages, **kwargs)
        self.kv_config = kv_cache_config(
            num_blocks,
            windows=windows,
            mixed_heads=mixed_heads,
            num_rows=num_rows,
            retention_interval=retention_interval,
        )
        self.num_rows = num_rows
        self.num_blocks = num_blocks
        self.is_async = kwargs.get("async_scheduling", False)
        self.num_stages = num_stages
        self.num_ahead = self.config.max_concurrent_batches - 1  # steps that are scheduled before the first ends
        self.guess = guess
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tpu_offload.adapters.vllm.connector.count_workers", lambda config: num_workers * num_stages)
            timed = functools.partial(SchedulerSide, clock=clock)
            patch.setattr("tpu_offload.adapters.vllm.connector.SchedulerSide", timed)
            if num_rows:  # as `install_hybrid_coordinator_hooks` does
                patch.setattr("vllm.v1.core.sched.scheduler.KVCacheManager", TPUKVCacheManager)
                make = tpu_get_kv_cache_coordinator
                patch.setattr("vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator", make)
            self.scheduler = (AsyncScheduler if self.is_async else Scheduler)(
                vllm_config=self.config,
                kv_cache_config=generate_scheduler_kv_cache_config([self.kv_config]),
                log_stats=True,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK_SIZE,
            )
        self.connectors = [
            KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.kv_config)
            for _ in range(max(num_workers, num_stages))
        ]
        self.runners = [Runner(self.config, self.kv_config, process_index=i) for i in range(num_workers)]
        if num_stages > 1:
            self.runners = [
                Runner(
                    self.config,
                    self.kv_config,
                    process_index=i,
                    num_layers=NUM_LAYERS - i % 2,
                    stage=i,
                    num_stages=num_stages,
                )
                for i in range(num_stages)
            ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu_utils, "hbm_usage_bytes", lambda devices: [(0, 4 * GB) for _ in devices])
            for connector, runner in zip(self.connectors, self.runners, strict=True):
                patch.setattr(worker_side, "_process_index", lambda runner=runner: runner.process_index)
                connector.register_runner(runner)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, len(self.runners))
        for worker in self.workers:
            worker.wait_until_allocated()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.errors: set[str] = set()
        self.in_flight: list[Any] = []
        self.num_steps = 0
        self.passes = Passes(self.runners, self.requests, num_ahead=self.num_ahead, is_async=self.is_async)
        self.events: list[Any] = []
        self.tamper = lambda outputs: outputs
        self.meanwhile: Callable[[], object] = lambda: None  # called while the step runs

    @property
    def side(self):
        return self.scheduler.connector.scheduler_side

    @property
    def offload(self):
        return connector_scheduler(self.side)

    @property
    def workers(self):
        return [connector.worker_side.worker for connector in self.connectors]

    def add(self, request_id: str, prompt, **kwargs) -> Request:
        request = self.make_request(request_id, prompt, **kwargs)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request

    def more(self, request_id: str, prompt, **kwargs) -> None:
        """The next part of the prompt of a resumable request."""
        self.scheduler.add_request(self.make_request(request_id, prompt, resumable=True, **kwargs))

    @staticmethod
    def make_request(
        request_id: str,
        prompt,
        *,
        max_tokens: int = 3,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        resumable: bool = False,
        **extra,
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **extra)
        params.update_from_generation_config({}, EOS)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            mm_features=None,
            cache_salt=salt,
            lora_request=lora,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
            resumable=resumable,
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def sequence(self, request_id: str) -> Prefix:
        """The tokens of the request, and those that the model would generate."""
        return self.passes.sequence(request_id)

    @property
    def num_wrong(self) -> int:
        """How many requests, summed over the steps, were computed on blocks that were reported as invalid."""
        return self.passes.num_wrong

    def step(self) -> None:
        """One step. With async scheduling or stages, schedules a step and ends an earlier one."""
        self.begin_step()
        self.meanwhile()
        if self.in_flight and (len(self.in_flight) > self.num_ahead or not self.scheduler.has_requests()):
            self.end_step()
        self.num_steps += 1

    def begin_step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.in_flight.append((output, self.execute(output)))

    def end_step(self) -> None:
        output, result = self.in_flight.pop(0)
        for core_outputs in self.scheduler.update_from_output(output, result).values():
            for item in core_outputs.outputs:
                self.outputs[item.request_id] += item.new_token_ids
                if str(item.finish_reason) == "error":
                    self.errors.add(item.request_id)
        self._propose(output)

    def drain(self, *, max_steps: int = 400) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
        waiting = {i: (r.status.name, r.num_computed_tokens, r.num_tokens) for i, r in self.scheduler.requests.items()}
        raise AssertionError(f"not finished after {max_steps} steps: {waiting}")

    def serve(self, request_id: str, prompt, **kwargs) -> Request:
        request = self.add(request_id, prompt, **kwargs)
        self.drain()
        return request

    def replace_reports(self, result: ModelRunnerOutput, message: ReportMessage | None) -> None:
        """Has a worker report this in place of what it has reported."""
        messages = message and ReportMessages(of_schedulers={self.side.scheduler_id: message})
        result.kv_connector_output.kv_connector_worker_meta = messages

    def check(self) -> None:
        self.side.check_invariants()
        for request_id, tokens in self.outputs.items():
            request = self.requests[request_id]
            num_prompt = request.num_prompt_tokens
            assert tokens == self.sequence(request_id).tokens[num_prompt : num_prompt + len(tokens)], request_id
            if request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
                assert len(tokens) == request.max_tokens

    def check_end(self, *, silent_worker: bool = False) -> None:
        """Checks that nothing has leaked.

        The staging blocks of copies that a silent worker may still run stay reserved until it reports.
        """
        self.check()
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        assert not self.num_rows or pool.mamba_pool.get_num_free_blocks() == self.num_rows - 1
        self.side.check_empty()
        list(self.side.take_events())
        assert not event_sources(self.side), "blocks of requests that have ended"
        if self.offload is not None:
            stats = self.offload.stats()
            assert stats.num_jobs_in_flight == 0
            assert stats.staging_reserved_blocks == 0 or silent_worker
            assert not request_table(self.offload)
        for connector in self.connectors:
            assert not open_loads(connector.worker_side)

    def close(self) -> None:
        for connector in self.connectors:
            connector.shutdown()

    # The workers' step.

    def execute(self, output) -> ModelRunnerOutput:
        """The workers' part of a step."""
        kv_outputs, ids = [], list(output.num_scheduled_tokens)
        with set_forward_context(None, self.config), contextlib.ExitStack() as connected:
            for connector, runner in zip(self.connectors, self.runners, strict=True):
                with _agent(connector):
                    begun = KVConnectorModelRunnerMixin._get_kv_connector_output(output)
                    kv_outputs.append(connected.enter_context(begun))
                runner.update_tables(output)
            # Failed synchronous loads are known when the pass begins.
            invalid = set().union(*(invalid_block_ids(connector.worker_side) for connector in self.connectors))
            sampled = self.passes.run(output, invalid)
        self.passes.report(set().union(*(kv_output.invalid_block_ids for kv_output in kv_outputs)))
        results = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=[sampled[request_id] for request_id in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=kv_output,
            )
            for kv_output in kv_outputs
        ]
        if self.num_stages > 1 and ids:
            for i, (runner, kv_output) in enumerate(zip(self.runners, kv_outputs, strict=True)):
                runner.execute_model(kv_output)
                results[i] = runner.sample_tokens(results[i])
        return self.aggregator.aggregate(self.tamper(results), output_rank=len(results) - 1)

    def _propose(self, output) -> None:
        speculative = self.config.speculative_config
        if speculative is None or self.is_async:
            return
        drafts = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                known, tokens = request.num_tokens, self.sequence(request_id).tokens
                drafts[request_id] = [
                    token if self.guess() else (token + 1) % VOCABULARY
                    for token in tokens[known : known + speculative.num_speculative_tokens]
                ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))


@contextlib.contextmanager
def _agent(connector):
    """Makes this the worker connector of the process; vLLM has only one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        yield


def reports_of(result: ModelRunnerOutput) -> ReportMessage | None:
    """The message of a worker to the scheduler side; None if it has nothing new."""
    messages = result.kv_connector_output.kv_connector_worker_meta
    if messages is None:
        return None
    (message,) = messages.of_schedulers.values()
    return message


def prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + i * 7) % VOCABULARY for i in range(num_tokens)]


# Setups that many tests share.

SMALL: dict[str, Any] = {"num_staging_blocks": 16, "num_cpu_chunks": 64, "sync_load": False}


def make_stack(**kwargs) -> Stack:
    stack = Stack(**{"num_blocks": 12, **SMALL, **kwargs})
    stack.serve("warm", prompt(BLOCK_SIZE, seed=99))  # the workers have reported their layout
    return stack


def save_prompt(stack: Stack, name: str, num_tokens: int = 40, **kwargs) -> list[int]:
    """Serves a prompt, so that its blocks are in the host tier, and empties HBM."""
    tokens = prompt(num_tokens, seed=20)
    stack.serve(name, tokens, **kwargs)
    stack.scheduler.reset_prefix_cache()
    return tokens


def hold_saves(stack: Stack) -> list:
    """Holds back the completion of saves until the returned list is emptied."""
    held = [True]
    for group in [group for worker in stack.workers for group in tier_groups(worker)]:

        def end(flight, real=group.end):
            if not (held and flight.direction is Direction.SAVE):
                real(flight)

        group.end = end
    return held


def broken(*_args):
    raise RuntimeError("injected")


def break_loads(stack: Stack, worker: int = 0) -> None:
    tier_group(stack.workers[worker]).copiers[Direction.LOAD].load = broken


def writing_call(copier: Copier) -> str:
    """The method with which a copier of loads writes the caches."""
    return "resume_load" if isinstance(copier, StagedCopier) else "load"


def take_caches(kv_caches) -> None:
    """Fails like a program that has consumed its donated caches."""
    for cache in kv_caches[:1]:
        cache.delete()
    raise RuntimeError("injected")


def lose_caches(stack: Stack, worker: int = 0, *, skip: int = 0) -> None:
    """Has a load destroy the caches, and only that one: the next, or a later one."""
    copier = tier_group(stack.workers[worker]).copiers[Direction.LOAD]
    name = writing_call(copier)
    load, left = getattr(copier, name), [skip]

    def fail(*args):
        if left[0]:
            left[0] -= 1
            return load(*args)
        delattr(copier, name)
        take_caches(args[-1])

    setattr(copier, name, fail)
