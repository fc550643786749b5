"""A serving run over time: its requests, and counters sampled between steps."""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

from tpu_offload.engine import Engine
from tpu_offload.replay.serving import Record

_ENGINE_FIELDS = ("num_active", "num_waiting")
_OFFLOAD_FIELDS = (
    "staging_reserved_blocks",
    "staging_peak_blocks",
    "dropped_save_blocks",
    "dropped_load_blocks",
    "saved_nbytes",
    "loaded_nbytes",
    "num_resident_chunks",
    "num_evicted_chunks",
    "num_jobs_in_flight",
    "num_stored_chunks",
    "cascaded_nbytes",
    "promoted_nbytes",
    "swap_held_blocks",
    "swapped_out_nbytes",
    "swapped_in_nbytes",
)


@final
class Timeline:
    """Samples the counters of an engine while it serves; used by the thread that calls `Engine.step`.

    A sample takes some 50 us. At most one is taken in `interval_s`; when there are `max_samples`, every second one is
    removed and the interval doubles. So a long run has between half of them and all of them.

    Args:
      engine: the engine.
      interval_s: the first interval.
      max_samples: an even number of at least 2.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        interval_s: float = 0.02,
        max_samples: int = 400,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._max_samples = max_samples
        self._clock = clock
        self._start_s = clock()
        self._next_s = self._start_s
        self._samples: list[dict[str, float]] = []

    def sample(self) -> None:
        """Takes a sample if the interval has passed; called after each step."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._take(now_s)
        if len(self._samples) >= self._max_samples:
            del self._samples[1::2]
            self._interval_s *= 2
        self._next_s = now_s + self._interval_s

    def columns(self) -> dict[str, list[float]]:
        """One list for each counter and `at_s`, seconds from the start; a last sample is taken now.

        Counters of the library are there only if the engine has it.
        """
        self._take(self._clock())
        names = list(self._samples[0])
        return {name: [sample[name] for sample in self._samples] for name in names}

    def _take(self, now_s: float) -> None:
        engine, offload = self._engine.stats(), self._engine.offload_stats()
        sample: dict[str, float] = {"at_s": now_s - self._start_s}
        sample |= {name: getattr(engine, name) for name in _ENGINE_FIELDS}
        if offload is not None:
            sample |= {name: getattr(offload, name) for name in _OFFLOAD_FIELDS}
        self._samples.append(sample)


def request_columns(records: Sequence[Record], *, start_s: float) -> dict[str, list[Any]]:
    """One list for each property of the requests, in order of arrival; times in seconds from `start_s`."""
    ordered = sorted(records, key=lambda record: record.stats.arrival_s)
    stats = [record.stats for record in ordered]
    return {
        "request_id": [record.request_id for record in ordered],
        "arrival_s": [s.arrival_s - start_s for s in stats],
        "ttft_s": [s.ttft_s for s in stats],
        "completion_s": [s.completion_s for s in stats],
        "prompt_tokens": [len(record.prompt_tokens) for record in ordered],
        "computed_tokens": [s.prompt_tokens.computed for s in stats],
        "hbm_tokens": [s.prompt_tokens.hbm for s in stats],
        "host_tokens": [s.prompt_tokens.host for s in stats],
        "generated_tokens": [len(record.tokens) for record in ordered],
        "num_preemptions": [s.num_preemptions for s in stats],
    }
