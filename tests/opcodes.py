"""What a call costs, counted: the same on every machine, however busy."""

import sys


def num_opcodes(call, *args, **kwargs) -> int:
    """How many bytecodes a call runs. Loops inside the interpreter count nothing."""
    count = 0

    def see(code, offset):
        nonlocal count
        count += 1

    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
    monitoring.use_tool_id(tool, "num_opcodes")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, see)
    monitoring.set_events(tool, monitoring.events.INSTRUCTION)
    try:
        call(*args, **kwargs)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count
