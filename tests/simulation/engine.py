"""The simulated engine: continuous batching over a prefix cache, using every call of the library.

Requests are served first come, first served. The step's number decides which tokens are computed, which drafts are
accepted and whether a preempted request is swapped out. The model is deterministic: the next token is a function of the
previous ones, so requests with a common prefix that diverge by a fault can share blocks again.

One long file, because all of it changes the same requests and blocks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

from tests.simulation.blocks import BlockPool, CacheKey
from tests.simulation.groups import Group, Reads
from tests.simulation.memory import Junk, Prefixes, Violation, kv, mix
from tests.simulation.model import Model
from tests.simulation.request import Phase, Request, TokenSpan
from tests.simulation.tables import BlockTables, Found, Tables
from tests.simulation.trace import Setup
from tpu_offload import (
    BlockHash,
    BlockHasher,
    CachedPrefix,
    KVLayout,
    Match,
    MatchState,
    OffloadScheduler,
    ScheduledRequest,
    Update,
)

_WAITS = (Phase.LOADING, Phase.SWAPPED, Phase.RETURNING)


@final
class SimEngine:
    """The simulated engine: requests, their blocks and the calls of the library.

    Args:
      setup: sizes.
      layout: layout for the hashes.
      groups: the layer groups.
      scheduler: the real scheduler.
      model: notified of the engine's calls.
      clock: the simulated time.
      junk: source of KV that must not be used.
      log: called with a line per event.
    """

    def __init__(
        self,
        setup: Setup,
        layout: KVLayout,
        groups: Sequence[Group],
        scheduler: OffloadScheduler,
        model: Model,
        clock: Callable[[], float],
        junk: Junk,
        log: Callable[[str], None],
    ) -> None:
        self.setup = setup
        self.scheduler = scheduler
        self.model = model
        self.clock = clock
        self.junk = junk
        self.log = log
        self.prefixes = Prefixes()
        self.hasher = BlockHasher(layout.fingerprint(), block_size=setup.block_size)
        self.groups = groups
        self.tables = BlockTables(groups, [BlockPool(setup.num_blocks), BlockPool(setup.num_rows)], self._on_evict)
        self.requests: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.epoch = 0
        self._num_arrived = 0
        self._origins: dict[BlockHash, tuple[Request, int]] = {}  # of cached blocks, and of some already evicted

    # External events.

    def arrive(self, a: int, b: int) -> None:
        """Adds a request with a prompt from a small tree of prompts, or the next turn of a finished one."""
        setup = self.setup
        if len(self.requests) >= setup.max_requests:
            return
        limit = min(44, setup.num_blocks // (1 + len(setup.windows)) * setup.block_size - 8)
        salt = mix(a, 3) % setup.num_salts
        tokens = [a >> i // 6 & 1 for i in range(1 + b % 40)]
        if self.ended and b % 3 == 0:
            former = self.ended[a % len(self.ended)]
            salt, tokens = former.salt, [*former.tokens[: 1 + mix(b, 1) % len(former.tokens)], a & 1]
        tokens = tokens[: limit - 6]
        self.submit(tokens, salt=salt, max_tokens=min(limit, len(tokens) + 1 + mix(b, 2) % 14))

    def submit(self, tokens: list[int], *, salt: int, max_tokens: int) -> Request:
        """Adds a request with this prompt."""
        self._num_arrived += 1
        name = next(name for i in range(9) if (name := f"r{(self._num_arrived + i) % 9}") not in self.requests)
        request = Request(name, self._num_arrived, salt, [], [], len(tokens), max_tokens)
        for token in tokens:
            self._append(request, token)
        self.requests[name] = request
        self.counts["requests"] += 1
        self.log(f"{name} arrives: {len(tokens)} tokens, ends at {request.max_tokens}")
        return request

    def abort(self, a: int) -> None:
        request = self._pick(a, self.requests.values())
        if request is not None:
            self.log(f"{request.name} is aborted while {request.phase.value}")
            self.counts[f"aborts while {request.phase.value}"] += 1
            self._finish(request)

    def preempt_one(self, a: int, b: int) -> None:
        request = self._pick(
            a, (r for r in self.requests.values() if r.phase.holds_blocks or r.phase is Phase.PROMISED)
        )
        if request is not None:
            self._preempt(request, swap=b % 3 > 0)

    def reset(self, a: int) -> None:
        """New weights: resets the caches. Requests restart, or continue with the KV that they have."""
        self.log(f"reset to epoch {self.epoch + 1}; requests {'restart' if a % 3 == 0 else 'continue'}")
        self.counts["resets"] += 1
        self.counts["resets with loads in flight"] += any(r.phase is Phase.LOADING for r in self.requests.values())
        if a % 3 == 0:
            for request in self._queue():
                if request.phase.holds_blocks or request.phase is Phase.PROMISED:
                    self._preempt(request, swap=False)
        self.epoch += 1
        self.tables.invalidate()
        self.scheduler.reset()
        self.model.on_reset()
        for request in self.requests.values():
            if request.phase is Phase.PROMISED and a % 4 < 2:
                self._release(request)
            self.counts["promises revoked by a reset"] += request.phase is Phase.PROMISED
            request.is_stale = request.phase.holds_blocks and request.num_computed > 0
            request.swap_is_stale = request.phase in (Phase.SWAPPED, Phase.RETURNING)

    def lose_caches(self) -> None:
        """A worker has lost the KV caches, by an update: preempts all requests with blocks."""
        self.lose_steps()
        self.counts["reported losses of the caches"] += 1

    # The step.

    def schedule(self, number: int) -> list[TokenSpan]:
        """Chooses what the next step computes; number 0 computes everything that fits."""
        budget = self.setup.max_batch
        spans: list[TokenSpan] = []
        for request in [r for r in self._queue() if r.phase is Phase.RUNNING]:
            dice = mix(number, request.arrival) if number else 0
            if request.phase is Phase.RUNNING and budget > 0 and not (dice and dice % 6 == 0):
                span = self._plan_span(request, dice, budget)
                if span is not None:
                    spans.append(span)
                    budget -= span.end - span.start
        spans = [span for span in spans if span.request.phase is Phase.RUNNING and span.request.tables]
        for request in [r for r in self._queue() if r.phase in (Phase.WAITING, Phase.PROMISED, Phase.SWAPPED)]:
            dice = mix(number, request.arrival + 500) if number else 0
            if not self._try_admit(request, dice):
                break
            if request.phase is Phase.RUNNING and budget > 0:
                span = self._plan_span(request, dice, budget)
                if span is not None:
                    spans.append(span)
                    budget -= span.end - span.start
        if number and mix(number, 4242) % 10 == 0:
            self._stop_a_waiting_request(mix(number, 4243))
        spans = [span for span in spans if span.request.phase is Phase.RUNNING and span.request.tables]
        for span in spans:
            self.tables.settle(span.request.tables, span.start, span.end)
        return spans

    def changed_requests(self, spans: list[TokenSpan], number: int) -> list[ScheduledRequest]:
        """The requests for `plan_step`: those in which the step completes a block, and occasionally others."""
        changed = []
        for span in spans:
            request = span.request
            num_full = span.end // self.setup.block_size
            if num_full != request.num_named or (number and mix(number, request.arrival + 900) % 7 == 0):
                request.num_named = num_full
                retained: list[int] = []
                if number and len(self.groups) > 1 and mix(number, request.arrival + 901) % 4 == 0:
                    retained = [mix(request.arrival, i) % (num_full + 2) * self.setup.block_size for i in range(2)]
                changed.append(self._scheduled(request, span.end, retained))
        return changed

    def _scheduled(self, request: Request, num_computed: int, retained: Sequence[int] = ()) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=request.name,
            block_tables=request.tables,
            block_hashes=request.hashes,
            num_prompt_tokens=request.num_prompt,
            num_computed_tokens=num_computed,
            retained_tokens=retained,
        )

    def reads(self, span: TokenSpan) -> list[Reads]:
        """What the layers of all groups read in a step."""
        request = span.request
        return [
            group.reads(table, request.kv, span.start, span.end)
            for group, table in zip(self.groups, request.tables, strict=True)
        ]

    def writes(self, spans: list[TokenSpan]) -> list[tuple[int, int, int]]:
        """(block, offset, KV) of all writes of the forward pass; updates the KV that requests must have."""
        writes: list[tuple[int, int, int]] = []
        for span in spans:
            request = span.request
            for _ in range(span.num_accepted):
                self._sample(request)
            num_right = span.end + span.num_accepted
            del request.kv[span.start :]
            for i in range(span.start, num_right):
                request.kv.append(self.junk.one() if request.is_stale else kv(request.nodes[i], self.epoch))
            rejected = [self.junk.one() for _ in range(num_right, span.end + span.num_drafts)]
            for group, table in zip(self.groups, request.tables, strict=True):
                writes += group.writes(table, [*request.kv[span.start :], *rejected], span.start)
        return writes

    def abort_step(self, spans: list[TokenSpan]) -> None:
        """The step was not executed: its tokens are computed again, and its requests named again."""
        for span in spans:
            span.request.num_named = 0
            self.tables.unsettle(span.request.tables, span.start, span.end)
        self.counts["aborted steps"] += bool(spans)

    def lose_steps(self) -> None:
        """Some steps were not executed whose tokens count as computed: computes all again that is in HBM."""
        for request in self._queue():
            if request.phase.holds_blocks:
                self._preempt(request, swap=False, is_lost=True)
        self.tables.invalidate()

    def complete(self, spans: list[TokenSpan]) -> None:
        """Processes the results of the step."""
        for span in spans:
            request = span.request
            first = request.num_computed // self.setup.block_size
            request.num_computed = span.end + span.num_accepted
            self._register(request, first)
            self.counts["accepted drafts"] += span.num_accepted
            self.counts["rejected drafts"] += span.num_drafts - span.num_accepted
            if request.num_computed == len(request.tokens):
                if len(request.tokens) < request.max_tokens:
                    self._sample(request)
                if len(request.tokens) >= request.max_tokens:
                    self.log(f"{request.name} finishes")
                    self.counts["finished"] += 1
                    self.ended = [*self.ended[-7:], request]
                    self._finish(request)

    def take(self, update: Update) -> None:
        """Processes an update: ended loads and swaps, lost caches."""
        for name in update.loaded:
            request = self._waiting_for(name, Phase.LOADING, "loaded")
            first = request.num_computed // self.setup.block_size
            self.model.on_end_of_load(name, request.num_loading, finished=True)
            self._end_load(request, request.num_computed + request.num_loading)
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
            self._end_load(request, failed.num_valid_tokens)
            self._register(request, first)
            self.counts["failed loads"] += 1
            self.log(f"{request.name}: load failed, {failed.num_valid_tokens} tokens are valid")
        for name in update.swapped_in:
            request = self._waiting_for(name, Phase.RETURNING, "swapped in")
            if request.swap_is_stale:
                raise Violation(f"{name} was swapped in with KV from before the reset")
            request.phase = Phase.RUNNING
            self.counts["swapped in"] += 1
            self.log(f"{name} is swapped in")
        for name in update.lost_swaps:
            swapped = self.requests.get(name)
            if swapped is None or swapped.phase not in (Phase.SWAPPED, Phase.RETURNING):
                raise Violation(f"an update says that the swap of {name} is lost, but it is not swapped out")
            self.counts["lost swaps"] += 1
            self.log(f"{name}: swap is lost")
            self._release_blocks(swapped)
        if update.lost_caches:
            self.log(f"workers {update.lost_caches} have lost the KV caches")
            self.lose_caches()

    # Internals.

    def _stop_a_waiting_request(self, dice: int) -> None:
        """Aborts or preempts a request that waits for a copy, possibly before the workers received it."""
        request = self._pick(dice >> 4, (r for r in self.requests.values() if r.phase in _WAITS))
        if request is not None and (dice % 4 == 0 or request.phase is Phase.SWAPPED):
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

    def _end_load(self, request: Request, num_computed: int) -> None:
        """The request's KV is loaded up to `num_computed` tokens: it can run."""
        del request.kv[num_computed:]
        for i in range(len(request.kv), num_computed):
            request.kv.append(kv(request.nodes[i], self.epoch))
        request.num_computed = num_computed
        request.num_loading = 0
        request.phase = Phase.RUNNING
        self.tables.release_left_over(request.tables, num_computed)
        if not self.tables.can_continue(request.tables, num_computed):
            self.counts["failed loads that a window was granted for"] += 1
            self._preempt(request, swap=False)

    def _register(self, request: Request, first: int) -> None:
        if not request.is_stale and self.setup.hbm_cache and request.tables:
            end = request.num_computed // self.setup.block_size
            self.tables.register(request.tables, request.hashes, first, end)
            for i in range(first, end):
                self._origins.setdefault(request.hashes[i], (request, i))

    def _plan_span(self, request: Request, dice: int, budget: int) -> TokenSpan | None:
        """The tokens of a request in the step, with blocks for them; None if the request itself was preempted."""
        start, known = request.num_computed, len(request.tokens)
        num_tokens = min(known - start, budget)
        if dice >> 4 & 1:
            num_tokens = min(num_tokens, 1 + (dice >> 5) % 7)
        span = TokenSpan(request, start, self.end_of_step(start, start + num_tokens, dice))
        if span.end == known and self.setup.max_drafts:
            room = request.max_tokens - known
            span.num_drafts = min((dice >> 8) % (self.setup.max_drafts + 1), max(0, room - 1))
            span.num_accepted = (dice >> 12) % (span.num_drafts + 1)
        self.tables.release_passed(request.tables, start)
        wanted = [group.granted(start, span.end + span.num_drafts) for group in self.groups]
        missing = self.tables.num_missing(request.tables, wanted)
        while not self.tables.can_allocate(missing):
            victim = [r for r in self._queue() if r.phase.holds_blocks][-1]
            self._preempt(victim, swap=not dice >> 16 & 1)
            if victim is request:
                return None
        self.tables.fill(request.tables, wanted)
        return span

    def end_of_step(self, start: int, end: int, dice: int) -> int:
        """Where a step ends that could compute these tokens."""
        chunk_tokens = self.setup.block_size * self.setup.blocks_per_chunk
        return min(group.end_of_step(start, end, dice=dice, chunk_tokens=chunk_tokens) for group in self.groups)

    def _try_admit(self, request: Request, dice: int) -> bool:
        """Grants blocks to a waiting request; False if it, and those behind it, must wait."""
        if request.phase is Phase.SWAPPED:
            return dice % 8 > 0 or self._try_swap_in(request)  # sometimes it lets others go first
        size, num_tokens = self.setup.block_size, len(request.tokens)
        cached, num_cached = self.tables.nothing(), 0
        if request.phase is Phase.WAITING:
            cached = self.tables.find_prefix(request.hashes[: (num_tokens - 1) // size])
            num_cached = len(cached[0]) * size
            found = self.scheduler.match(
                request.name, request.hashes, num_tokens=num_tokens, num_computed_tokens=num_cached
            )
            request.num_promised = found.num_tokens
            self.model.on_match(request, num_cached, self.epoch)
            self._check_wait(request, found)
            if dice % 5 == 1 and found.state is MatchState.ARRIVING:
                self.counts["waits for a save"] += 1
                self._release(request)
                return False
        num_loaded = request.num_promised
        if num_loaded and dice % 11 == 3:  # an engine may take fewer tokens, but not of a load with windows
            num_loaded = dice % num_loaded if len(self.groups) == 1 else 0
        lingers = dice % 5 == 2 or (request.phase is Phase.PROMISED and dice % 2)
        tables = None
        if not lingers:
            tables = self.tables.grant(*self._to_grant(request, cached, num_cached, num_loaded, dice))
        if tables is None:
            if (request.phase is Phase.WAITING and dice >> 20 & 1) or num_cached or not request.num_promised:
                self._release(request)
            else:
                request.phase = Phase.PROMISED
            return False
        self._admit(request, tables, num_cached, num_loaded)
        return True

    def _to_grant(
        self, request: Request, cached: Found, num_cached: int, num_loaded: int, dice: int
    ) -> tuple[list[Sequence[int]], Found]:
        """Per layer group, where a request gets blocks, and the cached ones among them.

        The first group gets all at once. The others get what the load fills, and what they need before it, if it fails.
        """
        size = self.setup.block_size
        loads_on = num_loaded if dice >> 21 & 1 else 0
        wanted: list[Sequence[int]] = [range(-(-len(request.tokens) // size))]
        shared = [cached[0]]
        for group, found in zip(self.groups[1:], cached[1:], strict=True):
            needed = group.needed(num_cached + loads_on)
            kept = {p: block for p, block in found.items() if p in needed}
            end = (num_cached + num_loaded) // size
            loaded = group.loaded(num_cached // size, end) if num_loaded else ()
            wanted.append([*kept, *loaded])
            shared.append(kept)
        return wanted, shared

    def _check_wait(self, request: Request, found: Match) -> None:
        """Raises Violation unless a match answers ARRIVING only until the deadline that the first one set."""
        now_s = self.clock()
        if found.until_s is None:
            timed_out = 0 < request.waits_until_s <= now_s and found.num_tokens <= request.num_found
            self.counts["waits for a save that timed out"] += timed_out
            request.waits_until_s = 0.0
            return
        latest_s = request.waits_until_s or now_s + self.setup.save_wait_s
        if not now_s < found.until_s <= latest_s:
            raise Violation(
                f"{request.name} waits until {found.until_s:g} s; expected {latest_s:g} s at most, now is {now_s:g} s"
            )
        request.waits_until_s, request.num_found = found.until_s, found.num_tokens

    def _on_evict(self, key: CacheKey) -> None:
        """A cached block is about to be granted: reports the prefix that loses it."""
        group_id, block_hash = key
        if group_id:
            return
        request, number = self._origins.pop(block_hash)
        self.scheduler.evict(
            CachedPrefix(
                block_hashes=request.hashes,
                num_blocks=number + 1,
                block_of=lambda group_id, block_hash: self.tables.pools[0].get((group_id, block_hash)),
                num_prompt_tokens=request.num_prompt,
            )
        )

    def _release(self, request: Request) -> None:
        self.scheduler.release(request.name)
        self.model.on_release(request.name)
        request.phase = Phase.WAITING
        request.num_promised = 0

    def _admit(self, request: Request, tables: Tables, num_cached: int, num_loaded: int) -> None:
        request.num_promised = 0
        request.waits_until_s = 0.0
        self.scheduler.admit(request.name, tables, num_loaded_tokens=num_loaded)
        self.model.on_admit(request, tables, num_cached, num_loaded)
        request.tables = tables
        request.num_computed, request.num_loading, request.num_named = num_cached, num_loaded, 0
        request.kv = [kv(node, self.epoch) for node in request.nodes[:num_cached]]
        request.is_stale = False
        request.phase = Phase.LOADING if num_loaded else Phase.RUNNING
        self.counts["admitted"] += 1
        self.log(f"{request.name} is admitted: {num_cached} tokens in HBM, {num_loaded} to load")

    def _try_swap_in(self, request: Request) -> bool:
        size, swap = self.setup.block_size, self.scheduler.swap
        if not swap.can_swap_in(request.name):
            return False
        if request.swap_is_stale:
            raise Violation(f"{request.name} could be swapped in with KV from before the reset")
        num_full = 0 if request.is_stale else request.num_computed // size
        pool = self.tables.pools[0]
        present = {i: b for i in range(num_full) if (b := pool.get((0, request.hashes[i]))) is not None}
        wanted = [group.needed(request.num_computed) for group in self.groups]
        wanted[0] = range(-(-len(request.tokens) // size))
        tables = self.tables.grant(wanted, [present, *self.tables.nothing()[1:]])
        if tables is None:
            return False
        request.tables = tables
        request.num_named = 0
        granted = [tables[0], *self._in_use(request)[1:]]
        waits = swap.swap_in(request.name, granted, present=present)
        request.phase = Phase.RETURNING if waits else Phase.RUNNING
        self.counts["swap-ins"] += 1
        self.log(f"{request.name} is being swapped in, {len(present)} blocks are in HBM")
        return True

    def _in_use(self, request: Request) -> Tables:
        """Per layer group, the blocks that a request needs to continue."""
        return [
            [table[p] for p in group.needed(request.num_computed)]
            for group, table in zip(self.groups, request.tables, strict=True)
        ]

    def _preempt(self, request: Request, *, swap: bool, is_lost: bool = False) -> None:
        """Preempts a request: releases its blocks or its promise."""
        self.counts[f"preempted while {request.phase.value}"] += 1
        out = False
        if request.phase is Phase.RETURNING:
            self.scheduler.swap.abort_swap_in(request.name)
            out = True
        elif request.phase is Phase.RUNNING and swap:
            hashes = () if request.is_stale else request.hashes
            out = self.scheduler.swap.swap_out(
                request.name, self._in_use(request), hashes, num_computed_tokens=request.num_computed
            )
            self.counts["swap-outs"] += out
        self.log(f"{request.name} is preempted while {request.phase.value}; {'swapped out' if out else 'recompute'}")
        if request.phase is not Phase.RETURNING:
            held = None
            if request.tables and not (out or is_lost):
                held = self._scheduled(request, request.num_computed)
            self.scheduler.preempt(request.name, held=held)
            self.model.on_gone(request.name)
        self._release_blocks(request, out=out)

    def _release_blocks(self, request: Request, *, out: bool = False) -> None:
        self.tables.free(request.tables)
        request.tables = []
        request.num_loading = request.num_promised = request.num_named = 0
        request.waits_until_s = 0.0  # the wait of a preempted request starts again
        request.phase = Phase.SWAPPED if out else Phase.WAITING
        if not out:
            request.num_computed = 0
            request.kv = []
            request.swap_is_stale = False

    def _finish(self, request: Request) -> None:
        del self.requests[request.name]
        self.scheduler.finish(request.name)
        self.scheduler.swap.discard([request.name])
        self.model.on_gone(request.name)
        self.model.loads.end_request(request.name)
        self.tables.free(request.tables)
        request.tables = []
