"""What a call costs, counted: the same on every machine, however busy."""

import gc
import sys
import threading


def num_opcodes(call, *args, **kwargs) -> int:
    """How many bytecodes a call runs. Loops inside the interpreter count nothing.

    Nor do other threads, and finalizers of what earlier tests have left: the garbage collector is off.
    """
    count, own = 0, threading.get_ident()

    def see(code, offset):
        nonlocal count
        count += threading.get_ident() == own

    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
    monitoring.use_tool_id(tool, "num_opcodes")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, see)
    collects = gc.isenabled()
    gc.disable()
    monitoring.set_events(tool, monitoring.events.INSTRUCTION)
    try:
        call(*args, **kwargs)
    finally:
        monitoring.set_events(tool, 0)
        if collects:
            gc.enable()
        monitoring.free_tool_id(tool)
    return count
