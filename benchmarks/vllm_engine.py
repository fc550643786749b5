"""A child of bench_vllm.py: a whole vLLM engine with one connector, measured round by round.

A round has three parts, on conversations generated from the seed:

    serve   all turns of all conversations, a few at a time; between two turns the others evict a conversation
    idle    one more turn of each conversation, one request at a time, in an otherwise idle engine
    busy    one more turn of each, one at a time, while a few other requests decode
"""

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from common import environment
from vllm_common import StepTimer, model_dir, serve_parent, transfer_config

IDLE_SLEEP_S = 0.001
"""vLLM's engine process sleeps this long after a step that computed nothing; the in-process engine does not."""

type Chats = list[list[int]]
type Text = Callable[[int], list[int]]


class Compiles:
    """Counts programs compiled since the last reset."""

    def __init__(self) -> None:
        import jax

        self.reset()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def reset(self) -> None:
        self.num, self.seconds = 0, 0.0

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            self.num += 1
            self.seconds += duration_secs


class Server:
    """Adds requests to the engine, steps it, and records when each token arrived."""

    def __init__(self, llm: Any, timer: StepTimer) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.timer = timer
        self.added_s: dict[str, float] = {}
        self.token_s: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.num_steps = self.num_empty_steps = 0
        self.loaded: dict[str, int] = {}
        self._executed = False
        self._watch_steps()
        self._watch_loads()

    def _watch_steps(self) -> None:
        step = self.core.step_fn

        def watched() -> Any:
            outputs, self._executed = step()
            return outputs, self._executed

        self.core.step_fn = watched

    def _watch_loads(self) -> None:
        connector = self.scheduler.connector
        if connector is None:
            return
        admit = connector.update_state_after_alloc

        def watched(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens:
                self.loaded[request.request_id] = self.loaded.get(request.request_id, 0) + num_external_tokens
            return admit(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = watched

    def add(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.prompt_tokens[request_id] = len(tokens)
        self.added_s[request_id] = time.perf_counter()
        self.token_s[request_id], self.tokens[request_id] = [], []
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=tokens), params)

    def step(self) -> list[str]:
        """Runs one step; returns the requests that finished in it."""
        outputs = self.engine.step()
        now_s = time.perf_counter()
        self.num_steps += 1
        self.num_empty_steps += not self._executed
        ended = []
        for output in outputs:
            request_id, tokens = output.request_id, list(output.outputs[0].token_ids)
            self.token_s[request_id] += [now_s] * (len(tokens) - len(self.tokens[request_id]))
            self.tokens[request_id] = tokens
            if output.finished:
                self.done[request_id] = output.num_cached_tokens or 0
                ended.append(request_id)
        if not self._executed and self.scheduler.has_requests():
            time.sleep(IDLE_SLEEP_S)
        return ended

    def drain(self) -> None:
        """Steps until all requests have finished, then waits for background threads."""
        while self.scheduler.has_requests() or self.engine.has_unfinished_requests() or self.core.batch_queue:
            self.step()
        time.sleep(0.02)

    def ttft_s(self, request_id: str) -> float:
        return self.token_s[request_id][0] - self.added_s[request_id]

    def loaded_of(self, request_id: str) -> int:
        """Loaded tokens of a request; vLLM appends to the ids that it is given."""
        return sum(n for name, n in self.loaded.items() if name == request_id or name.startswith(request_id + "-"))


class Engine:
    """Serves the parent's requests."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        (self.variant,) = args.variants

    def start(self) -> dict[str, Any]:
        import cpu_shim

        cpu_shim.install()
        from vllm import LLM

        args = self.args
        self.compiles = Compiles()
        started_s = time.perf_counter()
        self.llm = LLM(
            model=model_dir(args), load_format="dummy", skip_tokenizer_init=True, max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size, num_gpu_blocks_override=args.hbm_blocks, gpu_memory_utilization=0.5,
            enforce_eager=False, dtype=args.dtype, enable_prefix_caching=True, disable_log_stats=False,
            async_scheduling=args.async_scheduling, kv_transfer_config=transfer_config(self.variant),
        )  # fmt: skip
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.timer = StepTimer(scheduler)
        self.counted: OurStats | PeerStaging | None = None
        if scheduler.connector is not None:
            self.counted = PeerStaging(scheduler) if self.variant == "peer" else OurStats(scheduler)
        started = {"startup_s": time.perf_counter() - started_s, "startup_compile_s": self.compiles.seconds}
        self.server = Server(self.llm, self.timer)
        gc.collect()
        gc.freeze()
        return environment() | started

    def measure(self, *, variant: str, seed: int) -> dict[str, Any]:
        """Runs one round; returns figures and all generated tokens."""
        assert variant == self.variant
        args, server = self.args, self.server
        self.compiles.reset()
        for kept in (server.tokens, server.done, server.loaded):
            kept.clear()
        rng = random.Random(seed)

        def text(num_tokens: int) -> list[int]:
            return [rng.randrange(3, 1000) for _ in range(num_tokens)]

        chats = [text(args.prompt_tokens) for _ in range(args.conversations)]
        before = self._counters()
        parts = {}
        parts["serve"] = self._serve(seed, chats, text)
        parts["idle"] = self._probe(seed, chats, text, "idle")
        parts["busy"] = self._probe(seed, chats, text, "busy")
        return {
            "parts": parts,
            "tokens": {name: server.tokens[name] for name in server.done},
            "counters": self._since(before),
            "compiles": self.compiles.num,
            "compile_s": self.compiles.seconds,
        }

    def _serve(self, seed: int, chats: Chats, text: Text) -> dict[str, Any]:
        args, server = self.args, self.server
        turns = [(turn, i) for turn in range(args.turns) for i in range(len(chats))]
        questions = {key: text(args.turn_tokens) for key in turns}
        names: list[str] = []
        running: dict[str, int] = {}
        begin, k = self._begin(), 0
        while k < len(turns) or running:
            while k < len(turns) and len(running) < args.max_num_seqs and turns[k][1] not in running.values():
                turn, i = turns[k]
                if turn:
                    chats[i] += questions[turn, i]
                name = f"{seed}-serve-{turn}-{i}"
                server.add(name, list(chats[i]), args.max_tokens)
                names.append(name)
                running[name] = i
                k += 1
            for name in server.step():
                chats[running.pop(name)] += server.tokens[name]
        return self._end(begin, names, later=lambda name: not name.startswith(f"{seed}-serve-0-"))

    def _probe(self, seed: int, chats: Chats, text: Text, part: str) -> dict[str, Any]:
        args, server = self.args, self.server
        server.drain()
        others: list[str] = []
        names: list[str] = []
        gaps: list[float] = []
        num_others = 0
        begin = self._begin()

        def step() -> list[str]:
            nonlocal num_others
            while part == "busy" and len(others) < args.background:
                name = f"{seed}-other-{num_others}"
                rng = random.Random(name)
                server.add(name, [rng.randrange(3, 1000) for _ in range(16)], args.background_tokens)
                others.append(name)
                num_others += 1
            ended = server.step()
            for name in ended:
                if name in others:
                    others.remove(name)
            return ended

        for i, chat in enumerate(chats):
            chat += text(args.turn_tokens)
            name = f"{seed}-{part}-{i}"
            if part == "busy":
                for _ in range(4):
                    step()
            else:
                server.drain()
            server.add(name, list(chat), args.probe_tokens)
            names.append(name)
            while name not in step():
                pass
            if part == "busy":
                came_s = server.token_s[name][0]
                gaps += [
                    max((b - a for a, b in itertools.pairwise(t) if b > server.added_s[name] and a < came_s),
                        default=0.0)
                    for t in (server.token_s[other] for other in list(others))
                ]  # fmt: skip
            chat += server.tokens[name]
        figures = self._end(begin, names, later=lambda name: True)
        server.drain()
        return figures | {"gap_s": [gap for gap in gaps if gap]}

    def _begin(self) -> tuple[float, int, int]:
        self.timer.reset()
        return time.perf_counter(), self.server.num_steps, self.server.num_empty_steps

    def _end(self, begin: tuple[float, int, int], names: list[str], *, later: Callable[[str], bool]) -> dict[str, Any]:
        started_s, num_steps, num_empty_steps = begin
        server = self.server
        wall_s = max(server.token_s[name][-1] for name in names) - started_s
        loaded = sum(server.loaded_of(name) for name in names)
        prompts = sum(server.prompt_tokens[name] for name in names)
        return {
            "wall_s": wall_s,
            "num_tokens": sum(len(server.tokens[name]) for name in names),
            "num_steps": server.num_steps - num_steps,
            "num_empty_steps": server.num_empty_steps - num_empty_steps,
            "scheduler_s": self.timer.steps(),
            "ttft_s": [server.ttft_s(name) for name in names if later(name)],
            "loaded_tokens": loaded,
            "hbm_tokens": sum(server.done[name] for name in names) - loaded,
            "prompt_tokens": prompts,
            "computed_tokens": prompts - sum(server.done[name] for name in names),
        }

    def _counters(self) -> dict[str, float]:
        return self.counted.counters() if self.counted is not None else {}

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        after = self._counters()
        return {k: v if k == "staging_peak_blocks" else v - before.get(k, 0) for k, v in after.items()}


class OurStats:
    """Adds up the statistics that the connector returns to vLLM after each step."""

    def __init__(self, scheduler: Any) -> None:
        self._data: dict[str, Any] = {}
        connector = scheduler.connector
        take = connector.get_kv_connector_stats

        def watched() -> Any:
            stats = take()
            if stats is not None:
                total = connector.build_kv_connector_stats(self._data)
                self._data = dict(total.aggregate(stats).data)
            return stats

        connector.get_kv_connector_stats = watched

    def counters(self) -> dict[str, float]:
        names = ("dropped_save_blocks", "dropped_load_blocks", "deferred_save_blocks", "num_failed_jobs",
                 "num_evicted_chunks", "saved_blocks", "loaded_blocks", "staging_peak_blocks")  # fmt: skip
        return {name: self._data.get(name, 0) for name in names}


class PeerStaging:
    """Peak of the peer's staging buffer, by wrapping its `allocate`: the peer reports neither peak nor drops."""

    def __init__(self, scheduler: Any) -> None:
        self.peak = self.saved = self.loaded = 0
        manager = scheduler.connector.connector_scheduler.staging_buffer_manager
        self._manager, allocate = manager, manager.allocate

        def watched(*args: Any, **kwargs: Any) -> Any:
            got = allocate(*args, **kwargs)
            self.peak = max(self.peak, manager.get_num_used_staging_blocks())
            return got

        manager.allocate = watched

    def counters(self) -> dict[str, float]:
        manager = self._manager
        return {
            "staging_peak_blocks": self.peak,
            "saved_blocks": manager.get_num_total_allocate_blocks_for_save(),
            "loaded_blocks": manager.get_num_total_allocate_blocks_for_load(),
        }


if __name__ == "__main__":
    serve_parent(Engine(argparse.Namespace(**json.loads(sys.argv[1]))))
