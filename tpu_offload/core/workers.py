"""The workers of one scheduler: their number, incarnations and cache epochs, and whether their settings agree.

One plan goes to all workers, so all must have been made with the same settings, and there must be as many as the
scheduler waits for. Each sends its settings with its first reports (`WorkerSetup`). A mismatch is an error then, before
anything that the worker says is used.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

from tpu_offload.errors import ConfigError
from tpu_offload.types import CacheEpoch, StepReport, WorkerSetup

_logger = logging.getLogger(__name__)

# What has to be alike on all workers, beside what the scheduler has itself, and how it is set.
_ALIKE = {
    "save_path": "TPU_OFFLOAD_SAVE_PATH, and TPU_OFFLOAD_COPY_PROFILE for auto",
    "load_path": "TPU_OFFLOAD_LOAD_PATH, and TPU_OFFLOAD_COPY_PROFILE for auto",
}
_ALIKE_IN_ONE_PROGRAM = {"segment_chunks": "TPU_OFFLOAD_HOST_SEGMENT_GB and the size of the host tier"}
OWN = {
    "fingerprint": "the model and its KV caches, of which the scheduler's layout was made",
    "blocks_per_chunk": "TPU_OFFLOAD_BLOCKS_PER_CHUNK and the sizes that turn offloading on",
    "staging_blocks": "the size of the staging buffer (TPU_OFFLOAD_STAGING_BUFFER_TOKENS, _GB or _NUM_STAGING_BLOCKS)",
    "max_load_blocks": "TPU_OFFLOAD_MAX_LOAD_GB_PER_STEP",
    "bucket_blocks": "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS",
    "max_swap_blocks": "TPU_OFFLOAD_SWAP_GB",
    "storage_chunks": "TPU_OFFLOAD_STORAGE_TIER and TPU_OFFLOAD_NUM_STORAGE_CHUNKS",
}
"""Fields of `WorkerSetup` that the scheduler has a value of its own for, and how they are set."""


@final
class Workers:
    """The workers of one scheduler.

    Args:
      num_workers: how many report each step.
      own: for each field in `OWN`, the scheduler's value.
      clock: monotonic seconds.
      patience_s: a worker that has not reported for so long is missed in the log.
    """

    def __init__(
        self, num_workers: int, *, own: Mapping[str, Any], clock: Callable[[], float], patience_s: float
    ) -> None:
        self._num_workers = num_workers
        self._own = own
        self._setups: dict[int, WorkerSetup] = {}
        self._epochs = ((0, 0),) * num_workers
        self._missing = set(range(num_workers))
        self._missed_at_s = clock() + patience_s
        self._patience_s = patience_s

    def __len__(self) -> int:
        return self._num_workers

    @property
    def epochs(self) -> tuple[tuple[int, int], ...]:
        """What `StepPlan.cache_epochs` says of them."""
        return self._epochs

    def check(self, report: StepReport) -> None:
        """Raises ConfigError if what the worker says of itself does not fit."""
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
        # The newest counts for the others, also if it does not fit: they may be about to be started anew like it.
        self._setups[worker_id] = setup
        self._check_alike(worker_id, setup)

    def hear(self, report: StepReport) -> None:
        """Takes note of a worker whose report fits; what its epoch means is for the caller."""
        if self._missing:
            self._missing.discard(report.worker_id)

    def known_epoch(self, worker_id: int) -> tuple[int, int]:
        """The life, and the number of cache losses, that the worker is known in; zeros before it has reported."""
        return self._epochs[worker_id]

    def set_epoch(self, epoch: CacheEpoch) -> None:
        """From the next plan on, this is what the scheduler knows of a worker."""
        epochs = list(self._epochs)
        epochs[epoch.worker_id] = epoch.incarnation, epoch.num_losses
        self._epochs = tuple(epochs)

    def miss(self, now_s: float) -> None:
        """Says once who has not reported for a long time. O(1)."""
        if self._missing and now_s >= self._missed_at_s:
            _logger.error(
                "nothing is offloaded until all %d workers have reported; worker(s) %s have not in %g s: check that "
                "each process has an OffloadWorker with its own worker_id, and num_workers",
                self._num_workers, ", ".join(map(str, sorted(self._missing))), self._patience_s,
            )  # fmt: skip
            self._missed_at_s = float("inf")

    def _is_one_process(self, worker_id: int, setup: WorkerSetup) -> bool:
        """Whether each worker is one process and each process one worker, where a process can be told by its index."""
        return all(
            (other_id == worker_id) == (other.process_index == setup.process_index)
            for other_id, other in self._setups.items()
            if setup.num_processes > 1 and other.num_processes > 1
        )

    def _check_alike(self, worker_id: int, setup: WorkerSetup) -> None:
        for field, how in OWN.items():
            if getattr(setup, field) != self._own[field]:
                raise _unlike(worker_id, setup, field, "the scheduler", self._own[field], how)
        for other_id, other in self._setups.items():
            if other_id == worker_id:
                continue
            one_program = setup.num_processes > 1 and other.num_processes > 1
            for field, how in (_ALIKE | (_ALIKE_IN_ONE_PROGRAM if one_program else {})).items():
                if getattr(setup, field) and getattr(other, field) and getattr(setup, field) != getattr(other, field):
                    raise _unlike(worker_id, setup, field, f"worker {other_id}", getattr(other, field), how)


def _unlike(worker_id: int, setup: WorkerSetup, field: str, who: str, value: Any, how: str) -> ConfigError:
    return ConfigError(
        f"worker {worker_id} has {field}={getattr(setup, field)!r}, {who} has {value!r}; expected the same everywhere: "
        f"set {how} alike for all processes"
    )
