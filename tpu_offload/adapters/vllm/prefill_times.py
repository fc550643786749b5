"""How long this engine takes to compute prompts, measured on vLLM's steps, for the choice between loads and recompute.

vLLM reports no such time, but the scheduler side sees both ends of a step. The beginning is `build_connector_meta`:
vLLM dispatches the step next. The end is `update_connector_output`, which vLLM calls once it has the step's tokens.
They come from the last program of the step, so by then all of it has run.

With async scheduling this holds as well. There the step before may still be running when this one is dispatched, so a
step begins no earlier than that one has ended. And vLLM looks for the tokens of a step only once it has dispatched the
next one: the end of a step may be seen late, and the next step seem too short by as much. So successive steps are
measured together, until no other is in flight.

Not every step tells how fast prefill is. Left out are

    decodes         A step has to compute prompts and hardly anything else. A decode reads all of its context; some
                    hundred tokens of it take as long as computing a prompt token.
    loads           Their programs run between those of the step.
    ranks, stages   A step of data-parallel ranks computes the prompts of other schedulers too. With pipeline stages
                    several steps run at a time.

The saves of a step are part of its time. A step with a compilation or another stall counts, but hardly: `TwoTermFit`
minimizes relative errors, so a step that is a hundred times too long has a hundredth of the weight.

A step without anything to report has no message of the workers, and an empty step may have one. So the plan of each
step that computes something says that it is timed, and the workers report its id.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import final

_MOSTLY = 0.9  # the least share of prompt tokens in a step
# A v6e chip reads the KV of one token of context (8B: 128 KiB at 1.6 TB/s) in a 400th of the time that it takes to
# compute a prompt token; a 70B model on 8 chips has 1 : 1,500. So these add 4 % at most.
_MAX_CONTEXT_PER_TOKEN = 16
_MAX_STEPS = 8  # that are measured together


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """What one step computes of prompts.

    Attributes:
      num_tokens: prompt tokens.
      num_attended: tokens that each of them attends to, summed.
    """

    num_tokens: int
    num_attended: float


def prefill_work(spans: Iterable[tuple[int, int, bool]]) -> PrefillWork | None:
    """The work of a step; None if it computes much else than prompts.

    Args:
      spans: for each request of the step its computed tokens before the step, those after it, and whether they are
        of the prompt.
    """
    num_tokens = num_others = num_context = 0
    num_attended = 0.0
    for first, end, is_prompt in spans:
        if is_prompt:
            num_tokens += end - first
            num_attended += (end - first) * (first + end) / 2
        else:
            num_others += end - first
            num_context += end
    is_mostly = num_tokens >= _MOSTLY * (num_tokens + num_others)
    if not num_tokens or not is_mostly or num_context > _MAX_CONTEXT_PER_TOKEN * num_tokens:
        return None
    return PrefillWork(num_tokens=num_tokens, num_attended=num_attended)


@final
class PrefillTimes:
    """Times steps. All calls come from the thread of vLLM's scheduler.

    Args:
      clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: dict[int, tuple[float, PrefillWork | None]] = {}  # by step, in order
        self._end_s = clock()  # of the last step that has ended
        self._run: list[tuple[PrefillWork, float]] = []  # the steps that are measured together

    def begin(self, step_id: int, work: PrefillWork | None) -> None:
        """A step that computes something is dispatched now.

        Args:
          step_id: of its plan.
          work: None if the step does not tell how fast prefill is.
        """
        self._begun[step_id] = self._clock(), work

    def end(self, step_id: int) -> tuple[PrefillWork, float] | None:
        """A step has ended; steps end in the order in which they begin.

        Returns:
          Work of this step and of those before it, and the seconds that all of them took; None as long as there is more
          to measure together, or nothing.
        """
        if step_id not in self._begun:  # reported twice
            return None
        is_next = next(iter(self._begun)) == step_id
        while next(iter(self._begun)) != step_id:
            del self._begun[next(iter(self._begun))]  # their ends were never reported
        start_s, work = self._begun.pop(step_id)
        last_s, self._end_s = self._end_s, self._clock()
        if work is not None and is_next:
            self._run.append((work, self._end_s - max(start_s, last_s)))
            if self._begun and len(self._run) < _MAX_STEPS:
                return None
        return self._take_run()

    def _take_run(self) -> tuple[PrefillWork, float] | None:
        run, self._run = self._run, []
        if not run:
            return None
        work = PrefillWork(
            num_tokens=sum(work.num_tokens for work, _ in run), num_attended=sum(work.num_attended for work, _ in run)
        )
        return work, sum(seconds for _, seconds in run)
