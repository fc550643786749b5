"""The simulated engine: continuous batching over a prefix cache, with everything an engine does to the library.

It is first come, first served. Which tokens a step computes, which drafts come true and whether a preempted request
is swapped out is decided by the number of the step. The model is deterministic: the next token is a function of the
tokens before it, so that requests which part in a crash meet again.
"""

from collections import Counter
from collections.abc import Callable
from typing import final

from tests.simulation.blocks import BlockPool
from tests.simulation.memory import Junk, Prefixes, Violation, kv, mix
from tests.simulation.model import Model
from tests.simulation.request import Phase, Request, Run
from tests.simulation.trace import Setup
from tpu_offload import (
    BlockHash,
    BlockHasher,
    CachedPrefix,
    KVLayout,
    MatchState,
    OffloadScheduler,
    ScheduledRequest,
    Update,
)

_WAITS = (Phase.LOADING, Phase.OUT, Phase.RETURNING)


@final
class SimEngine:
    """Requests and blocks.

    Args:
      setup: sizes.
      layout: for the hashes.
      scheduler: the real one.
      model: is told what the engine asks for.
      junk: where KV that nobody may use comes from.
      log: is called with what happens.
    """

    def __init__(
        self,
        setup: Setup,
        layout: KVLayout,
        scheduler: OffloadScheduler,
        model: Model,
        junk: Junk,
        log: Callable[[str], None],
    ) -> None:
        self.setup = setup
        self.scheduler = scheduler
        self.model = model
        self.junk = junk
        self.log = log
        self.prefixes = Prefixes()
        self.hasher = BlockHasher(layout.fingerprint(), block_size=setup.block_size)
        self.pool = BlockPool(setup.num_blocks)
        self.requests: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.epoch = 0
        self._num_arrived = 0
        self._origins: dict[BlockHash, tuple[Request, int]] = {}  # of cached contents, and some that are no more

    # What happens from outside.

    def arrive(self, a: int, b: int) -> None:
        """A request with a prompt from a small tree of prompts, or the next turn of one that has ended."""
        setup = self.setup
        if len(self.requests) >= setup.max_requests:
            return
        limit = min(44, setup.num_blocks * setup.block_size - 8)
        salt = mix(a, 3) % setup.num_salts
        tokens = [a >> i // 6 & 1 for i in range(1 + b % 40)]
        if self.ended and b % 3 == 0:
            former = self.ended[a % len(self.ended)]
            salt, tokens = former.salt, [*former.tokens[: 1 + mix(b, 1) % len(former.tokens)], a & 1]
        tokens = tokens[: limit - 6]
        self.submit(tokens, salt=salt, max_tokens=min(limit, len(tokens) + 1 + mix(b, 2) % 14))

    def submit(self, tokens: list[int], *, salt: int, max_tokens: int) -> None:
        """A request with this prompt."""
        self._num_arrived += 1
        name = next(name for i in range(9) if (name := f"r{(self._num_arrived + i) % 9}") not in self.requests)
        request = Request(name, self._num_arrived, salt, [], [], len(tokens), max_tokens)
        for token in tokens:
            self._append(request, token)
        self.requests[name] = request
        self.counts["requests"] += 1
        self.log(f"{name} arrives: {len(tokens)} tokens, ends at {request.max_tokens}")

    def abort(self, a: int) -> None:
        request = self._pick(a, self.requests.values())
        if request is not None:
            self.log(f"{request.name} is aborted while {request.phase.value}")
            self.counts[f"aborts while {request.phase.value}"] += 1
            self._finish(request)

    def preempt_one(self, a: int, b: int) -> None:
        request = self._pick(a, (r for r in self.requests.values() if r.phase.holds_blocks or r.phase is Phase.PARKED))
        if request is not None:
            self._preempt(request, swap=b % 3 > 0)

    def reset(self, a: int) -> None:
        """New weights: the caches are void. Requests start over, or go on with what they have."""
        self.log(f"reset to epoch {self.epoch + 1}; requests {'start over' if a % 3 == 0 else 'go on'}")
        self.counts["resets"] += 1
        self.counts["resets with loads in flight"] += any(r.phase is Phase.LOADING for r in self.requests.values())
        if a % 3 == 0:
            for request in self._queue():
                if request.phase.holds_blocks or request.phase is Phase.PARKED:
                    self._preempt(request, swap=False)
        self.epoch += 1
        self.pool.forget()
        self.scheduler.reset()
        self.model.on_reset()
        for request in self.requests.values():
            if request.phase is Phase.PARKED and a % 4 < 2:
                self._release(request)
            self.counts["promises that a reset took back"] += request.phase is Phase.PARKED
            request.tainted = request.phase.holds_blocks and request.num_computed > 0
            request.is_void = request.phase in (Phase.OUT, Phase.RETURNING)

    def lose_hbm(self) -> None:
        """A worker has lost the KV caches, as an update says: everybody starts over."""
        for request in self._queue():
            if request.phase.holds_blocks:
                self._preempt(request, swap=False, is_lost=True)
        self.pool.forget()
        self.counts["losses of the caches heard of"] += 1

    # The step.

    def schedule(self, number: int) -> list[Run]:
        """Chooses what the coming step computes; 0 stands for everything that fits."""
        budget = self.setup.max_batch
        runs: list[Run] = []
        for request in [r for r in self._queue() if r.phase is Phase.RUNNING]:
            dice = mix(number, request.arrival) if number else 0
            if request.phase is Phase.RUNNING and budget > 0 and not (dice and dice % 6 == 0):
                run = self._plan_run(request, dice, budget)
                if run is not None:
                    runs.append(run)
                    budget -= run.end - run.start
        runs = [run for run in runs if run.request.phase is Phase.RUNNING and run.request.blocks]
        for request in [r for r in self._queue() if r.phase in (Phase.WAITING, Phase.PARKED, Phase.OUT)]:
            dice = mix(number, request.arrival + 500) if number else 0
            if not self._enter(request, dice):
                break
            if request.phase is Phase.RUNNING and budget > 0:
                run = self._plan_run(request, dice, budget)
                if run is not None:
                    runs.append(run)
                    budget -= run.end - run.start
        if number and mix(number, 4242) % 10 == 0:
            self._change_mind(mix(number, 4243))
        return [run for run in runs if run.request.phase is Phase.RUNNING and run.request.blocks]

    def name(self, runs: list[Run], number: int) -> list[ScheduledRequest]:
        """The requests in which the step completes a block, and now and then others."""
        named = []
        for run in runs:
            request = run.request
            num_full = run.end // self.setup.block_size
            if num_full != request.num_named or (number and mix(number, request.arrival + 900) % 7 == 0):
                request.num_named = num_full
                named.append(
                    ScheduledRequest(
                        request_id=request.name,
                        block_tables=[request.blocks],
                        block_hashes=request.hashes,
                        num_prompt_tokens=request.num_prompt,
                        num_computed_tokens=run.end,
                    )
                )
        return named

    def writes(self, runs: list[Run]) -> list[tuple[int, int, int]]:
        """(block, offset, KV) of all that the forward pass writes; notes what the requests' KV is from then on."""
        writes, size = [], self.setup.block_size
        for run in runs:
            request = run.request
            for _ in range(run.num_accepted):
                self._sample(request)
            num_right = run.end + run.num_accepted
            del request.kv[run.start :]
            for i in range(run.start, num_right):
                request.kv.append(self.junk.one() if request.tainted else kv(request.nodes[i], self.epoch))
                writes.append((request.blocks[i // size], i % size, request.kv[i]))
            for i in range(num_right, run.end + run.num_drafts):
                writes.append((request.blocks[i // size], i % size, self.junk.one()))
        return writes

    def complete(self, runs: list[Run]) -> None:
        """The step has run."""
        for run in runs:
            request = run.request
            first = request.num_computed // self.setup.block_size
            request.num_computed = run.end + run.num_accepted
            self._register(request, first)
            self.counts["accepted drafts"] += run.num_accepted
            self.counts["rejected drafts"] += run.num_drafts - run.num_accepted
            if request.num_computed == len(request.tokens):
                if len(request.tokens) < request.max_tokens:
                    self._sample(request)
                if len(request.tokens) >= request.max_tokens:
                    self.log(f"{request.name} finishes")
                    self.counts["finished"] += 1
                    self.ended = [*self.ended[-7:], request]
                    self._finish(request)

    def take(self, update: Update) -> None:
        """What the library says became of loads and swaps."""
        for name in update.loaded:
            request = self._waiting_for(name, Phase.LOADING, "loaded")
            first = request.num_computed // self.setup.block_size
            self.model.on_end_of_load(name, request.num_loading, finished=True)
            self._come(request, request.num_computed + request.num_loading)
            self._register(request, first)
            self.counts["loaded requests"] += 1
        for failed in update.failed_loads:
            request = self._waiting_for(failed.request_id, Phase.LOADING, "a failed load")
            loaded = request.num_computed + request.num_loading
            if not 0 <= failed.num_valid_tokens <= loaded:
                raise Violation(f"{failed} of a load from {request.num_computed} to {loaded}")
            first = min(request.num_computed, failed.num_valid_tokens) // self.setup.block_size
            self.counts["loads used in part"] += request.num_computed < failed.num_valid_tokens
            self.model.on_end_of_load(request.name, failed.num_valid_tokens - request.num_computed, finished=False)
            self._come(request, failed.num_valid_tokens)
            self._register(request, first)
            self.counts["failed loads"] += 1
            self.log(f"{request.name}: load failed, {failed.num_valid_tokens} tokens are there")
        for name in update.swapped_in:
            request = self._waiting_for(name, Phase.RETURNING, "swapped in")
            if request.is_void:
                raise Violation(f"{name} is back with KV of before the reset")
            request.phase = Phase.RUNNING
            self.counts["swapped in"] += 1
            self.log(f"{name} is back")
        for name in update.lost_swaps:
            swapped = self.requests.get(name)
            if swapped is None or swapped.phase not in (Phase.OUT, Phase.RETURNING):
                raise Violation(f"a swap of {name} is lost that the engine does not know")
            self.counts["lost swaps"] += 1
            self.log(f"{name}: swap is lost")
            self._give_blocks_back(swapped)
        if update.lost_caches:
            self.log(f"workers {update.lost_caches} have lost the KV caches")
            self.lose_hbm()

    # Inside.

    def _change_mind(self, dice: int) -> None:
        """A request goes that waits for a copy, maybe before the workers have heard of that."""
        request = self._pick(dice >> 4, (r for r in self.requests.values() if r.phase in _WAITS))
        if request is not None and (dice % 4 == 0 or request.phase is Phase.OUT):
            self.log(f"{request.name} is aborted while {request.phase.value}")
            self.counts[f"aborts while {request.phase.value}"] += 1
            self._finish(request)
        elif request is not None:
            self._preempt(request, swap=False)

    def _queue(self) -> list[Request]:
        return sorted(self.requests.values(), key=lambda r: r.arrival)

    def _pick(self, number: int, requests) -> Request | None:
        found = sorted(requests, key=lambda r: r.arrival)
        return found[number % len(found)] if found else None

    def _waiting_for(self, name: str, phase: Phase, what: str) -> Request:
        request = self.requests.get(name)
        if request is None or request.phase is not phase:
            where = "not here" if request is None else request.phase.value
            raise Violation(f"an update says {what} of {name}, which is {where}")
        return request

    def _append(self, request: Request, token: int) -> None:
        size, nodes = self.setup.block_size, request.nodes
        parent = nodes[-1] if nodes else self.prefixes.root(request.salt)
        nodes.append(self.prefixes.child(parent, token))
        request.tokens.append(token)
        if len(nodes) % size == 0:
            self.hasher.extend(request.hashes, request.tokens, cache_salt=str(request.salt))
            before = request.hashes[-2] if len(request.hashes) > 1 else None
            self.model.blocks[request.hashes[-1]] = tuple(nodes[-size:]), before

    def _sample(self, request: Request) -> None:
        self._append(request, mix(request.nodes[-1], 77) % 2)

    def _come(self, request: Request, num_computed: int) -> None:
        """A load brought the KV up to here."""
        del request.kv[num_computed:]
        for i in range(len(request.kv), num_computed):
            request.kv.append(kv(request.nodes[i], self.epoch))
        request.num_computed = num_computed
        request.num_loading = 0
        request.phase = Phase.RUNNING

    def _register(self, request: Request, first: int) -> None:
        if not request.tainted and self.setup.hbm_cache:
            for i in range(first, request.num_computed // self.setup.block_size):
                self.pool.register(request.blocks[i], request.hashes[i])
                self._origins.setdefault(request.hashes[i], (request, i))

    def _plan_run(self, request: Request, dice: int, budget: int) -> Run | None:
        """One request's part in the step, with the blocks for it; None if it had to give up its own."""
        start, known = request.num_computed, len(request.tokens)
        num_tokens = min(known - start, budget)
        if dice >> 4 & 1:
            num_tokens = min(num_tokens, 1 + (dice >> 5) % 7)
        run = Run(request, start, start + num_tokens)
        if run.end == known and self.setup.max_drafts:
            room = request.max_tokens - known
            run.num_drafts = min((dice >> 8) % (self.setup.max_drafts + 1), max(0, room - 1))
            run.num_accepted = (dice >> 12) % (run.num_drafts + 1)
        missing = -(-(run.end + run.num_drafts) // self.setup.block_size) - len(request.blocks)
        while missing > self.pool.num_free:
            victim = [r for r in self._queue() if r.phase.holds_blocks][-1]
            self._preempt(victim, swap=not dice >> 16 & 1)
            if victim is request:
                return None
        if missing > 0:
            request.blocks += self._allocate(missing)
        return run

    def _enter(self, request: Request, dice: int) -> bool:
        """Gives a waiting request blocks; False if it, and those behind it, have to wait."""
        if request.phase is Phase.OUT:
            return dice % 8 > 0 or self._bring_back(request)  # it may let others pass
        size, num_tokens = self.setup.block_size, len(request.tokens)
        cached: list[int] = []
        if request.phase is Phase.WAITING:
            cached = self.pool.lookup(request.hashes[: (num_tokens - 1) // size])
            num_cached = len(cached) * size
            found = self.scheduler.match(
                request.name, request.hashes, num_tokens=num_tokens, num_computed_tokens=num_cached
            )
            request.num_promised = found.num_tokens
            self.model.on_match(request, num_cached, self.epoch)
            if dice % 5 == 1 and found.state is MatchState.ARRIVING:
                self.counts["waits for a save"] += 1
                self._release(request)
                return False
        missing = -(-num_tokens // size) - len(cached)
        lingers = dice % 5 == 2 or (request.phase is Phase.PARKED and dice % 2)
        if missing > self.pool.num_free_without(cached) or lingers:
            if (request.phase is Phase.WAITING and dice >> 20 & 1) or cached or not request.num_promised:
                self._release(request)
            else:
                request.phase = Phase.PARKED
            return False
        self.pool.share(cached)
        self._admit(request, [*cached, *self._allocate(missing)], len(cached) * size, dice)
        return True

    def _allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, and tells of what is cached there."""
        for block_hash in self.pool.next_to_go(num_blocks):
            request, number = self._origins.pop(block_hash)
            self.scheduler.evict(
                CachedPrefix(
                    block_hashes=request.hashes,
                    num_blocks=number + 1,
                    block_of=lambda group_id, block_hash: self.pool.get(block_hash),
                    num_prompt_tokens=request.num_prompt,
                )
            )
        return self.pool.allocate(num_blocks)

    def _release(self, request: Request) -> None:
        self.scheduler.release(request.name)
        self.model.on_release(request.name)
        request.phase = Phase.WAITING
        request.num_promised = 0

    def _admit(self, request: Request, blocks: list[int], num_cached: int, dice: int) -> None:
        num_loaded, request.num_promised = request.num_promised, 0
        if num_loaded and dice % 11 == 3:
            num_loaded = dice % num_loaded  # the engine may take less
        self.scheduler.admit(request.name, [blocks], num_loaded_tokens=num_loaded)
        self.model.on_admit(request.name, num_loaded)
        request.blocks = blocks
        request.num_computed, request.num_loading, request.num_named = num_cached, num_loaded, 0
        request.kv = [kv(node, self.epoch) for node in request.nodes[:num_cached]]
        request.tainted = False
        request.phase = Phase.LOADING if num_loaded else Phase.RUNNING
        self.counts["admitted"] += 1
        self.log(f"{request.name} is admitted: {num_cached} tokens in HBM, {num_loaded} to load")

    def _bring_back(self, request: Request) -> bool:
        size, swap = self.setup.block_size, self.scheduler.swap
        if not swap.can_swap_in(request.name):
            return False
        if request.is_void:
            raise Violation(f"{request.name} could come back with KV of before the reset")
        num_full = 0 if request.tainted else request.num_computed // size
        present = {i: b for i in range(num_full) if (b := self.pool.get(request.hashes[i])) is not None}
        needed = -(-len(request.tokens) // size)
        if needed - len(present) > self.pool.num_free_without(list(present.values())):
            return False
        self.pool.share(list(present.values()))
        new = iter(self._allocate(needed - len(present)))
        request.blocks = [present[i] if i in present else next(new) for i in range(needed)]
        request.num_named = 0
        waits = swap.swap_in(request.name, [request.blocks], present=present)
        request.phase = Phase.RETURNING if waits else Phase.RUNNING
        self.counts["swap-ins"] += 1
        self.log(f"{request.name} is brought back, {len(present)} blocks are in HBM")
        return True

    def _preempt(self, request: Request, *, swap: bool, is_lost: bool = False) -> None:
        """The request gives its blocks, or its promise, back."""
        self.counts[f"preempted while {request.phase.value}"] += 1
        out = False
        if request.phase is Phase.RETURNING:
            self.scheduler.swap.abort_swap_in(request.name)
            out = True
        elif request.phase is Phase.RUNNING and swap:
            hashes = () if request.tainted else request.hashes
            out = self.scheduler.swap.swap_out(
                request.name, [request.blocks], hashes, num_computed_tokens=request.num_computed
            )
            self.counts["swap-outs"] += out
        self.log(f"{request.name} is preempted while {request.phase.value}; {'swapped out' if out else 'recompute'}")
        if request.phase is not Phase.RETURNING:
            held = None
            if request.blocks and not (out or is_lost):
                held = ScheduledRequest(
                    request_id=request.name,
                    block_tables=[request.blocks],
                    block_hashes=request.hashes,
                    num_prompt_tokens=request.num_prompt,
                    num_computed_tokens=request.num_computed,
                )
            self.scheduler.preempt(request.name, held=held)
            self.model.on_gone(request.name)
        self._give_blocks_back(request, out=out)

    def _give_blocks_back(self, request: Request, *, out: bool = False) -> None:
        self.pool.free(request.blocks)
        request.blocks = []
        request.num_loading = request.num_promised = request.num_named = 0
        request.phase = Phase.OUT if out else Phase.WAITING
        if not out:
            request.num_computed = 0
            request.kv = []
            request.is_void = False

    def _finish(self, request: Request) -> None:
        del self.requests[request.name]
        self.scheduler.finish(request.name)
        self.scheduler.swap.discard([request.name])
        self.model.on_gone(request.name)
        self.model.loads.end(request.name)
        self.pool.free(request.blocks)
        request.blocks = []
