"""Serves a workload with an engine in a closed loop."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tpu_offload.engine import FinishReason, Request, RequestOutput, RequestStats, SamplingParams
from tpu_offload.errors import InputError
from tpu_offload.replay.workloads import Conversation, Workload


class Engine(Protocol):
    """The interface that serving requires of an engine."""

    def add_request(self, request: Request) -> None:
        """Queues a request; its time to first token starts here."""

    def step(self) -> Sequence[RequestOutput]:
        """Runs one step; the last output of a request has `stats`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One served request; `logprobs` are those of its `tokens`."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    stats: RequestStats
    logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ServedRun:
    """The result of serving a workload.

    Attributes:
      records: finished requests, in order of completion.
      wall_s: seconds from the first request to the last token.
      complete: False if it was stopped before the end.
      start_s: when the first request was added, by the clock of `RequestStats`.
      timeline: the engine's counters over the run, see `Timeline.columns`; empty if they were not sampled.
    """

    records: tuple[Record, ...]
    wall_s: float
    complete: bool
    start_s: float = 0.0
    timeline: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    @property
    def ttfts_s(self) -> list[float]:
        """Times to first token, of the requests that have one."""
        return [record.stats.ttft_s for record in self.records if record.stats.ttft_s is not None]


class _Session:
    """The state of a conversation that is being served."""

    def __init__(self, conversation: Conversation, sampling: Callable[[str, int], SamplingParams]) -> None:
        self._conversation = conversation
        self._sampling = sampling
        self._history: tuple[int, ...] = ()
        self._num_answered = 0

    @property
    def done(self) -> bool:
        return self._num_answered == len(self._conversation.turns)

    def next_request(self) -> Request:
        turn = self._conversation.turns[self._num_answered]
        self._history += turn.tokens
        request_id = f"{self._conversation.name}/{self._num_answered}"
        return Request(
            request_id=request_id, prompt_tokens=self._history, sampling=self._sampling(request_id, turn.max_tokens)
        )

    def answer(self, tokens: tuple[int, ...]) -> None:
        given = self._conversation.turns[self._num_answered].answer
        self._history += tokens if given is None else given
        self._num_answered += 1


def serve(
    engine: Engine,
    workload: Workload,
    *,
    concurrency: int,
    sampling: Callable[[str, int], SamplingParams],
    on_finish: Callable[[], None],
    stop: Callable[[], bool],
    on_step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ServedRun:
    """Serves every turn of every conversation, in a closed loop.

    After each turn a conversation goes to the back of the queue, so that all others are served in between: the reuse
    distance is the whole workload.

    Args:
      engine: an engine without requests.
      workload: the workload.
      concurrency: number of requests in flight.
      sampling: returns the sampling parameters for a request id and a number of tokens.
      on_finish: called after each request.
      stop: called before each step; True ends the run with the requests finished so far.
      on_step: called after each step.
      clock: monotonic seconds.
    Raises:
      InputError: the engine can never serve a request.
    """
    waiting = collections.deque(_Session(conversation, sampling) for conversation in workload.conversations)
    active: dict[str, tuple[_Session, Request]] = {}
    records: list[Record] = []
    start_s = clock()
    while (waiting or active) and not stop():
        while waiting and len(active) < concurrency:
            session = waiting.popleft()
            request = session.next_request()
            active[request.request_id] = (session, request)
            engine.add_request(request)
        for output in engine.step():
            if output.stats is None:
                continue
            if output.finish_reason is FinishReason.ERROR:
                raise InputError(f"request {output.request_id} cannot be served: {output.error}")
            session, request = active.pop(output.request_id)
            records.append(
                Record(request.request_id, request.prompt_tokens, output.tokens, output.stats, output.logprobs)
            )
            session.answer(output.tokens)
            if not session.done:
                waiting.append(session)
            on_finish()
        on_step()
    return ServedRun(tuple(records), clock() - start_s, complete=not (waiting or active), start_s=start_s)
