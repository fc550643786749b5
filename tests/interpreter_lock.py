"""Tells whether a call holds the interpreter's lock, by what another thread can do meanwhile and not by time."""

import sys
import threading

_NUM_TRIES = 200


def releases_lock(call):
    """Whether another thread gets to run during `call`, which should take some hundred microseconds.

    A thread that waits for the lock asks for it after the switch interval only. With one that never ends it runs if
    `call` gives the lock away. The operating system may let it run too late, hence the tries.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        return any(_ran_beside(call) for _ in range(_NUM_TRIES))
    finally:
        sys.setswitchinterval(interval)


def _ran_beside(call):
    started, gate, ran = threading.Event(), threading.Lock(), []

    def wait():
        started.set()
        with gate:
            ran.append(True)

    gate.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    gate.release()  # the thread wants the interpreter's lock from now on
    call()
    result = bool(ran)
    thread.join()
    return result
