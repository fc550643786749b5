"""A child of bench_vllm.py: vLLM's scheduler alone with each connector, no model and no copies.

First the prompts of later arrivals are computed and saved, and the HBM prefix cache is emptied. Then many requests
decode, and after a while requests arrive, one per step, whose prompts are all in the host tier. Fake workers sample a
token for each request and report every copy as finished in the step that requested it.

All variants run in one process, because importing vLLM takes most of the time of a short run. A round is measured in
CPU time of its thread, and existing objects are frozen at its start, so that garbage collection does not visit those of
other variants.
"""

import argparse
import gc
import json
import pickle
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from common import environment
from vllm_common import EOS, StepTimer, model_dir, serve_parent, transfer_config


class SchedulerAlone:
    """The scheduler of one variant."""

    def __init__(self, args: argparse.Namespace, variant: str, model: str) -> None:
        self.args, self.variant = args, variant
        self.decode_prompt, self.decode_tokens = 128, args.decode_steps + 2 * args.arrivals + 64
        self.scheduler = self._make_scheduler(model)
        self.timer = StepTimer(self.scheduler)
        self.is_new = True
        self.pickled: list[tuple[float, int]] = []
        self.num_ended = self.num_cached = 0

    def _make_scheduler(self, model: str) -> Any:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        args, size, num_tokens = self.args, self.args.block_size, self.args.arrival_tokens
        blocks = args.running * -(-(self.decode_prompt + self.decode_tokens) // size) + 8 * num_tokens // size
        blocks = max(blocks, args.arrivals * (num_tokens // size + 2)) + 64
        config = VllmConfig(
            model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", seed=0),
            scheduler_config=SchedulerConfig(
                max_num_seqs=args.running + 16, max_num_batched_tokens=8192, max_model_len=1 << 14,
                enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=size, gpu_memory_utilization=0.9, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=transfer_config(self.variant),
        )  # fmt: skip
        config.cache_config.kv_cache_layout = "LBNHC"  # as the engine sets it before creating connectors
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        return Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
        )

    def measure(self, seed: int) -> dict[str, Any]:
        """Runs one round."""
        from vllm.v1.request import RequestStatus

        args, rng = self.args, random.Random(seed)
        prompts = [[rng.randrange(1000) for _ in range(args.arrival_tokens)] for _ in range(args.arrivals)]
        for i, prompt in enumerate(prompts):
            self.add(f"{seed}-fill-{i}", prompt, 1)
        self.drain()
        assert self.scheduler.reset_prefix_cache(), "blocks are still held"

        for i in range(args.running):
            self.add(f"{seed}-run-{i}", [rng.randrange(1000) for _ in range(self.decode_prompt)], self.decode_tokens)
        while self.scheduler.waiting:
            self.step()
        for _ in range(10):
            self.step()
        decode = self.part(lambda _: None, args.decode_steps)
        arrive = self.part(lambda i: self.add(f"{seed}-hit-{i}", prompts[i], 1), args.arrivals)
        running = [f"{seed}-run-{i}" for i in range(args.running)]
        self.scheduler.finish_requests(running, RequestStatus.FINISHED_ABORTED)
        self.drain()
        assert self.scheduler.reset_prefix_cache(), "blocks are still held"
        return {"decode": decode, "arrive": arrive}

    def part(self, before: Callable[[int], None], num_steps: int) -> dict[str, Any]:
        self.timer.reset()
        self.pickled.clear()
        self.num_cached = self.num_ended = 0
        for i in range(num_steps):
            before(i)
            self.step(measure_pickle=i % 8 == 0)
        return {
            "scheduler_s": self.timer.steps(),
            "schedule_s": list(self.timer.scheduled),
            "update_s": list(self.timer.updated),
            "pickle_s": [s for s, _ in self.pickled],
            "metadata_nbytes": [n for _, n in self.pickled],
            "num_ended": self.num_ended,
            "cached_tokens": self.num_cached,
        }

    def add(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, EOS)
        self.scheduler.add_request(
            Request(
                request_id=request_id, prompt_token_ids=tokens, sampling_params=params, pooling_params=None,
                mm_features=None, block_hasher=get_request_block_hasher(self.args.block_size, sha256),
            )
        )  # fmt: skip

    def drain(self) -> None:
        while self.scheduler.has_requests():
            self.step()

    def step(self, *, measure_pickle: bool = False) -> None:
        output = self.scheduler.schedule()
        if measure_pickle and output.kv_connector_metadata is not None:  # as it would be sent to another process
            started_s = time.thread_time()
            nbytes = len(pickle.dumps(output.kv_connector_metadata, pickle.HIGHEST_PROTOCOL))
            self.pickled.append((time.thread_time() - started_s, nbytes))
        outputs = self.scheduler.update_from_output(output, self.run(output))
        for engine_outputs in outputs.values():
            for one in engine_outputs.outputs:
                if one.finished:
                    self.num_ended += 1
                    self.num_cached += one.prefill_stats.num_cached_tokens if one.prefill_stats else 0

    def run(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        requests, ids = self.scheduler.requests, list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=self.copies(output.kv_connector_metadata),
        )

    def copies(self, metadata: Any) -> Any:
        """The report of the connector's worker for a step."""
        if metadata is None:
            return None
        return self.peer_copies(metadata) if self.variant == "peer" else self.our_copies(metadata)

    def peer_copies(self, metadata: Any) -> Any:
        from tpu_inference.offload.tpu_offload_connector import KVOffloadConnectorStats
        from vllm.v1.outputs import KVConnectorOutput

        stats = KVOffloadConnectorStats()
        for one in metadata.requests_meta:
            if one.load_spec and one.load_spec.can_load:
                stats.record_load(one.req_id, one.load_spec.src_chunks)
            if one.save_spec and one.save_spec.dst_chunks:
                stats.record_save(one.req_id, one.save_spec.dst_chunks)
        return KVConnectorOutput(kv_connector_stats=None if stats.is_empty() else stats)

    def our_copies(self, metadata: Any) -> Any:
        from offload_scheduler import finish_jobs
        from vllm.v1.outputs import KVConnectorOutput

        from tpu_offload import JobKind, KVLayout, LayerGroup, LayerGroupKind
        from tpu_offload.adapters.vllm.messages import ReportMessage, ReportMessages

        (message,) = metadata.requests_meta
        plan = message.plan
        layouts: tuple[tuple[int, KVLayout], ...] = ()
        if self.is_new:
            page = (self.args.block_size, 1, 2, 1)
            group = LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, (0,), page, "float32")
            layouts = ((0, KVLayout(block_size=self.args.block_size, groups=(group,))),)
        report = finish_jobs(plan, num_host_slots=(self.args.host_blocks,))
        is_empty = not (report.results or self.is_new)
        reports = (
            None
            if is_empty
            else ReportMessages(of_schedulers={message.scheduler_id: ReportMessage(reports=(report,), layouts=layouts)})
        )
        self.is_new = False
        received = {job.request_id for job in plan.of(JobKind.LOAD)} if self.variant != "ours-sync" else None
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=reports)


class Schedulers:
    """Serves the parent's requests."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.variants: dict[str, SchedulerAlone] = {}

    def start(self) -> dict[str, Any]:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash

        init_none_hash(sha256)
        model = model_dir(argparse.Namespace(**vars(self.args) | {"dtype": "float32"}))
        self.variants = {variant: SchedulerAlone(self.args, variant, model) for variant in self.args.variants}
        return environment()

    def measure(self, *, variant: str, seed: int) -> dict[str, Any]:
        gc.collect()
        gc.freeze()
        return self.variants[variant].measure(seed)


if __name__ == "__main__":
    serve_parent(Schedulers(argparse.Namespace(**json.loads(sys.argv[1]))))
