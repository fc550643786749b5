"""The workers of one scheduler: their number, incarnations and cache epochs, and whether their settings agree.

One plan goes to all workers, so all must have been made with the same settings, and there must be as many as the
scheduler waits for. Each sends its settings with its first reports (`WorkerSetup`). A mismatch raises an error then,
before anything else of the report is applied.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import ConfigError
from tpu_offload.layout import KVLayout
from tpu_offload.types import CacheEpoch, StepReport, WorkerSetup

_logger = logging.getLogger(__name__)

# Fields of `WorkerSetup` that all workers must agree on, beside those that the scheduler knows, and how they are set.
_SAME_ON_ALL_WORKERS = {
    "save_path": "TPU_OFFLOAD_SAVE_PATH, and TPU_OFFLOAD_COPY_PROFILE for auto",
    "load_path": "TPU_OFFLOAD_LOAD_PATH, and TPU_OFFLOAD_COPY_PROFILE for auto",
}
_SAME_IN_ONE_PROGRAM = {
    "segment_slots": "TPU_OFFLOAD_HOST_SEGMENT_GB and the size of the host tier",
}
_SAME_AS_SCHEDULER = {
    "fingerprint": "the model and its KV caches, of which the scheduler's layout was made",
    "blocks_per_chunk": "TPU_OFFLOAD_BLOCKS_PER_CHUNK and the sizes that turn offloading on",
    "staging_blocks": "the size of the staging buffer (TPU_OFFLOAD_STAGING_BUFFER_TOKENS, _GB or _NUM_STAGING_BLOCKS)",
    "max_load_blocks": "TPU_OFFLOAD_MAX_LOAD_GB_PER_STEP",
    "bucket_blocks": "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS",
    "max_swap_blocks": "TPU_OFFLOAD_SWAP_GB",
    "segment_slots": "TPU_OFFLOAD_HOST_SEGMENT_GB and the size of the host tier (TPU_OFFLOAD_HOST_GB)",
    "storage_chunks": "TPU_OFFLOAD_STORAGE_TIER and its sizes (TPU_OFFLOAD_NUM_STORAGE_CHUNKS or _STORAGE_GB)",
}
"""Fields of `WorkerSetup` that must agree with the scheduler's settings, and how they are set."""


def expected_setups(config: OffloadConfig, layout: KVLayout, num_workers: int) -> tuple[dict[str, Any], ...]:
    """Per worker, for fields in `_SAME_AS_SCHEDULER` that settings decide, the value that its setup must have."""
    return tuple(setup_fields(config, of_worker) for of_worker in layout.stages or (layout,) * num_workers)


def setup_fields(config: OffloadConfig, layout: KVLayout) -> dict[str, Any]:
    """The fields of a `WorkerSetup` that settings and layout decide; each side computes them from its own."""
    segments = config.host_segments(layout) if config.enabled else None
    expected: dict[str, Any] = {
        "fingerprint": layout.fingerprint().hex(),
        "blocks_per_chunk": config.blocks_per_chunk if config.enabled else 0,
        "staging_blocks": config.staging_blocks(layout) if config.enabled else 0,
        "max_load_blocks": config.max_load_blocks(layout) if config.enabled else 0,
        "bucket_blocks": tuple(config.block_size_buckets),
        "max_swap_blocks": config.max_swap_blocks(layout),
        "storage_chunks": config.storage_chunks(layout),
    }
    if segments is not None:  # else the worker's free memory decides, too
        expected["segment_slots"] = segments.segment_slots
    return expected


@final
class Workers:
    """The workers of one scheduler.

    Args:
      expected: what `expected_setups` returns: an entry for each worker that reports each step.
      clock: monotonic seconds.
      warn_after_s: a warning names the workers that have not reported within this time.
    """

    def __init__(
        self, *, expected: Sequence[Mapping[str, Any]], clock: Callable[[], float], warn_after_s: float
    ) -> None:
        self._num_workers = num_workers = len(expected)
        self._expected = expected
        self._setups: dict[int, WorkerSetup] = {}
        self._epochs = ((0, 0),) * num_workers
        self._missing = set(range(num_workers))
        self._warn_at_s = clock() + warn_after_s
        self._warn_after_s = warn_after_s

    def __len__(self) -> int:
        return self._num_workers

    @property
    def epochs(self) -> tuple[tuple[int, int], ...]:
        """For `StepPlan.cache_epochs`."""
        return self._epochs

    def check(self, report: StepReport) -> None:
        """Raises ConfigError if a worker's setup does not match the scheduler's or the other workers'."""
        worker_id, setup = report.worker_id, report.setup
        if setup is None:
            return
        name = f"worker {worker_id}"
        if worker_id >= self._num_workers or setup.num_processes > self._num_workers:
            raise ConfigError(
                f"{name} reports, with KV caches that are spread over {setup.num_processes} process(es); the scheduler "
                f"expects workers 0 to {self._num_workers - 1}: pass num_workers=, the number of worker processes, to "
                "OffloadScheduler, and to each OffloadWorker its own worker_id="
            )
        if setup.rival or not self._is_one_process(worker_id, setup):
            raise ConfigError(
                f"{name} is reported by more than one process, or its process reports as more than one worker; give "
                "each process one OffloadWorker with a worker_id= of its own, 0 to num_workers - 1"
            )
        # Kept even on a mismatch: the other workers may be about to restart with the same settings.
        self._setups[worker_id] = dataclasses.replace(setup, stored_keys=())  # they are many
        self._check_same(worker_id, setup)

    def note_report(self, report: StepReport) -> None:
        """A worker has reported."""
        if self._missing:
            self._missing.discard(report.worker_id)

    def known_epoch(self, worker_id: int) -> tuple[int, int]:
        """The known incarnation and number of cache losses of a worker; zeros before it has reported."""
        return self._epochs[worker_id]

    def set_epoch(self, epoch: CacheEpoch) -> None:
        """Sets the epoch of a worker's KV caches, from the next plan on."""
        epochs = list(self._epochs)
        epochs[epoch.worker_id] = epoch.incarnation, epoch.num_losses
        self._epochs = tuple(epochs)

    def warn_missing(self, now_s: float) -> None:
        """Logs once which workers have not reported for a long time. O(1)."""
        if self._missing and now_s >= self._warn_at_s:
            _logger.error(
                "nothing is offloaded until all %d workers have reported; worker(s) %s have not in %g s: check that "
                "each process has an OffloadWorker with its own worker_id, and num_workers",
                self._num_workers, ", ".join(map(str, sorted(self._missing))), self._warn_after_s,
            )  # fmt: skip
            self._warn_at_s = float("inf")

    def _is_one_process(self, worker_id: int, setup: WorkerSetup) -> bool:
        """Whether each worker is one process and each process one worker, as far as process indices show."""
        return all(
            (other_id == worker_id) == (other.process_index == setup.process_index)
            for other_id, other in self._setups.items()
            if setup.num_processes > 1 and other.num_processes > 1
        )

    def _check_same(self, worker_id: int, setup: WorkerSetup) -> None:
        expected = self._expected[worker_id]
        for field, how in _SAME_AS_SCHEDULER.items():
            if field in expected and getattr(setup, field) != expected[field]:
                raise _mismatch(worker_id, setup, field, "the scheduler", expected[field], how)
        for other_id, other in self._setups.items():
            if other_id == worker_id:
                continue
            one_program = setup.num_processes > 1 and other.num_processes > 1
            for field, how in (_SAME_ON_ALL_WORKERS | (_SAME_IN_ONE_PROGRAM if one_program else {})).items():
                if getattr(setup, field) and getattr(other, field) and getattr(setup, field) != getattr(other, field):
                    raise _mismatch(worker_id, setup, field, f"worker {other_id}", getattr(other, field), how)


def _mismatch(worker_id: int, setup: WorkerSetup, field: str, other: str, value: Any, how: str) -> ConfigError:
    return ConfigError(
        f"worker {worker_id} has {field}={getattr(setup, field)!r}, {other} has {value!r}; expected one value: set "
        f"{how} to the same value for all processes"
    )
