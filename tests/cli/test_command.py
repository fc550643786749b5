"""What commands have in common."""

import threading

from tests.storage.stores import fill
from tpu_offload.cli.main import main


def test_without_a_thread_it_is_one_line(tmp_path, monkeypatch, capsys):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    fill(str(tmp_path), 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert main(["tier", "verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "tpu-offload: error: can't start new thread: allow this process more of them (ulimit -u, or pids.max of its "
        "cgroup)\n"
    )
