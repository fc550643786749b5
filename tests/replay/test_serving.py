"""The closed loop, with a fake engine."""

import itertools
from typing import Any

import pytest

from tpu_offload.engine import FinishReason, PromptTokens, RequestOutput, RequestStats, SamplingParams
from tpu_offload.errors import InputError
from tpu_offload.replay.serving import serve
from tpu_offload.replay.workloads import Conversation, Turn, Workload


class RuleEngine:
    """A fake engine that finishes its oldest request in each step; the answer repeats the prompt's length."""

    def __init__(self, *, refuse=None):
        self.requests = []
        self.queue = []
        self.most_in_flight = 0
        self._refuse = refuse

    def add_request(self, request):
        self.requests.append(request)
        self.queue.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self.queue))

    def step(self):
        request = self.queue.pop(0)
        stats = RequestStats(
            arrival_s=0.0, first_token_s=1.0, finish_s=2.0, prompt_tokens=PromptTokens(), num_preemptions=0
        )
        if request.request_id == self._refuse:
            return [
                RequestOutput(
                    request_id=request.request_id,
                    tokens=(),
                    finish_reason=FinishReason.ERROR,
                    error="too long",
                    stats=stats,
                )
            ]
        tokens = (len(request.prompt_tokens),) * request.sampling.max_tokens
        unfinished = [RequestOutput(request_id=other.request_id, tokens=(1,)) for other in self.queue]
        return [
            *unfinished,
            RequestOutput(
                request_id=request.request_id, tokens=tokens, finish_reason=FinishReason.LENGTH, error="", stats=stats
            ),
        ]


def run(engine, workload, *, concurrency=2, stop=lambda: False, on_finish=lambda: None):
    return serve(
        engine,
        workload,
        concurrency=concurrency,
        sampling=lambda request_id, max_tokens: SamplingParams(max_tokens=max_tokens, seed=len(request_id)),
        on_finish=on_finish,
        stop=stop,
        clock=itertools.count().__next__,
    )


def conversation(name, *turns):
    return Conversation(name, tuple(Turn(*turn) for turn in turns))


def test_prompts_grow_by_what_was_generated_or_given():
    engine = RuleEngine()
    workload = Workload("w", (conversation("c", ((1, 2), 3), ((4,), 2, (9, 9)), ((5,), 1)),))
    served = run(engine, workload)
    assert [request.prompt_tokens for request in engine.requests] == [
        (1, 2),
        (1, 2, 2, 2, 2, 4),
        (1, 2, 2, 2, 2, 4, 9, 9, 5),
    ]
    assert [record.request_id for record in served.records] == ["c/0", "c/1", "c/2"]
    assert [record.tokens for record in served.records] == [(2, 2, 2), (6, 6), (9,)]
    assert [request.sampling.max_tokens for request in engine.requests] == [3, 2, 1]
    assert served.complete
    assert served.wall_s == 1


@pytest.mark.parametrize("concurrency", [1, 2, 3, 10])
def test_a_conversation_goes_to_the_back_of_the_queue(concurrency):
    engine = RuleEngine()
    workload = Workload("w", tuple(conversation(name, ((1,), 1), ((2,), 1)) for name in "abcd"))
    run(engine, workload, concurrency=concurrency)
    assert [request.request_id for request in engine.requests] == [
        f"{name}/{turn}" for turn in (0, 1) for name in "abcd"
    ]
    assert engine.most_in_flight == min(concurrency, 4)


def test_stop_ends_the_run_with_what_is_finished():
    finished: list[Any] = []
    workload = Workload("w", tuple(conversation(str(i), ((1,), 1)) for i in range(10)))
    served = run(RuleEngine(), workload, stop=lambda: len(finished) == 3, on_finish=lambda: finished.append(1))
    assert [record.request_id for record in served.records] == ["0/0", "1/0", "2/0"]
    assert not served.complete


def test_a_request_that_can_never_run_is_an_error():
    workload = Workload("w", (conversation("a", ((1,), 1)), conversation("b", ((1,), 1))))
    with pytest.raises(InputError, match="request b/0 cannot be served: too long"):
        run(RuleEngine(refuse="b/0"), workload)
