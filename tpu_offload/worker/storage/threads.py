"""The I/O threads of one storage tier: a queue for each, tasks in order by key or alone, and what waits for them."""

import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from tpu_offload.errors import MORE_THREADS, ConfigError
from tpu_offload.types import ChunkKey

_NUM_THREADS = 3  # for reads, and as many for writes: two keep a disk busy while one computes a checksum
_STOP_CHECK_S = 0.1


@final
class StorageThreads:
    """Daemon threads with a queue each. All tasks of a key run on one of them, in order.

    They hold no reference to this object, so they end when it is garbage-collected.

    Raises:
      ConfigError: not all of them can be started; those that were are ended.
    """

    def __init__(self, name: str, *, num_threads: int = _NUM_THREADS) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._finalizer = weakref.finalize(self, _stop_threads, self._queues, self._stop)
        for i in range(num_threads):
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_run, args=(tasks, self._stop), name=f"tpu_offload-{name}-{i}", daemon=True
            )
            self._queues.append(tasks)
            try:
                thread.start()
            except RuntimeError as e:
                self.stop()
                raise ConfigError(
                    f"{thread.name}: the thread cannot be started ({e}); a storage tier has up to 7: {MORE_THREADS}"
                ) from e
            self._threads.append(thread)

    def index(self, key: ChunkKey) -> int:
        """The thread of a key."""
        return key[0] % len(self._queues)

    def submit(self, key: ChunkKey, task: Callable[[], None]) -> None:
        """Queues a task, which must not raise."""
        self._queues[self.index(key)].put(task)

    def submit_alone(self, task: Callable[[], None]) -> None:
        """Queues a task that runs after all earlier ones of every thread, and before all later ones."""
        last, *others = self._queues
        arrived = [threading.Event() for _ in others]
        done = threading.Event()
        for tasks, event in zip(others, arrived, strict=True):
            tasks.put(functools.partial(_stand_by, event, done, self._stop))
        last.put(functools.partial(_run_alone, task, arrived, done, self._stop))

    def stop(self) -> None:
        """Has the threads end, dropping queued tasks."""
        self._finalizer()

    def join(self, until_s: float) -> bool:
        """Waits for stopped threads; False if some are still running at `until_s`."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _run(tasks: queue.SimpleQueue[Callable[[], None] | None], stop: threading.Event) -> None:
    while (task := tasks.get()) is not None:
        if not stop.is_set():
            task()
        task = None  # free its buffers while the queue is empty


def _stand_by(arrived: threading.Event, done: threading.Event, stop: threading.Event) -> None:
    arrived.set()
    _wait(done, stop)


def _run_alone(
    task: Callable[[], None], arrived: Sequence[threading.Event], done: threading.Event, stop: threading.Event
) -> None:
    if all(_wait(event, stop) for event in arrived):
        task()
    done.set()


def _wait(event: threading.Event, stop: threading.Event) -> bool:
    """Waits for an event that never comes once the threads are stopped."""
    while not event.wait(_STOP_CHECK_S):
        if stop.is_set():
            return False
    return True


def _stop_threads(queues: Sequence[queue.SimpleQueue[Callable[[], None] | None]], stop: threading.Event) -> None:
    stop.set()
    for tasks in queues:
        tasks.put(None)


class AtLeast:
    """Ready once I/O threads have put so many items into a queue that are not collected yet."""

    def __init__(self, done: deque[Any], num_items: int) -> None:
        self._done = done
        self._num_items = num_items

    def is_ready(self) -> bool:
        """Like `jax.Array.is_ready`."""
        return len(self._done) >= self._num_items
