"""The I/O threads of a storage tier, where no more threads can be started."""

import threading

import pytest

from tpu_offload.errors import ConfigError
from tpu_offload.worker.storage.threads import StorageThreads

NAME = "storage-read-0:file"


def test_threads_that_cannot_all_be_started_are_one_line_and_leave_none(monkeypatch):
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_two(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(ConfigError, match=f"{NAME}-2: the thread cannot be started") as caught:
            StorageThreads(NAME)
    assert "ulimit -u" in str(caught.value)
    for thread in started:  # while the error still has the frames
        thread.join(60)
        assert not thread.is_alive()
