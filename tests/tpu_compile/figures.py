"""What the TPU compiler says of a compiled program: sizes, schedule, copies of whole arrays.

Recorded figures are valid for this source and that of `schedule` only (see `recorded`).
"""

import math
import re
from typing import Any

from tests.tpu_compile.harness import Case
from tests.tpu_compile.schedule import read_schedule

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOST_COPIES = 100  # whose instructions are given


def figures(compiled: Any, case: Case) -> dict[str, Any]:
    """What the compiler says of a program, and its schedule."""
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    page = math.prod(case.page_shape) // case.tp
    whole = {
        case.num_blocks * page: "cache",
        case.segment_blocks * case.num_layers * page: "segment",
        case.bucket * case.num_layers * page: "staging",
    }
    schedule = read_schedule(text)
    itemsize = _ITEMSIZES.get(case.dtype, 1)
    return {
        "temp_nbytes": memory.temp_size_in_bytes,
        "output_nbytes": memory.output_size_in_bytes,
        "alias_nbytes": memory.alias_size_in_bytes,
        "host_temp_nbytes": memory.host_temp_size_in_bytes,
        "host_output_nbytes": memory.host_output_size_in_bytes,
        "host_alias_nbytes": memory.host_alias_size_in_bytes,
        "code_nbytes": memory.generated_code_size_in_bytes,
        "num_dmas": len(schedule.dmas),  # a loop's are counted once: they are those of one block
        "dma_nbytes": min((dma.num_elements * itemsize for dma in schedule.dmas), default=0),
        "max_dmas_in_flight": schedule.max_in_flight,
        "saved_under_compute": schedule.share_under_compute(to_host=True),
        "loaded_under_compute": schedule.share_under_compute(to_host=False),
        "whole_copies": whole_copies(text, whole)[:_MOST_COPIES],
        "collectives": re.findall(r"\b(?:all-gather|all-reduce|all-to-all|collective-permute)[\w-]*\(", text),
    }


_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(")
_SHAPE = re.compile(r"\b[a-z]+\d+\w*\[([\d,]*)\]")
# Operations that hand an array through, update it in place or allocate it, and those that start or end
# the transfer of a slice or the host's part of a program. A fusion's computation is in the text like any
# other, so its operations are looked at one by one. Whatever else yields a whole array has copied it.
_NO_COPY = """
    parameter tuple get-tuple-element while bitcast call conditional opt-barrier optimization-barrier fusion
    scatter dynamic-update-slice dynamic-update-slice-start dynamic-update-slice-done dynamic-slice-start
    dynamic-slice-done custom-call custom-call-start custom-call-done async-start async-update async-done
"""


def whole_copies(hlo: str, whole: dict[int, str]) -> list[str]:
    """Instructions of scheduled HLO that yield a copy of an array with as many elements as one of `whole`."""
    found = []
    for line in hlo.splitlines():
        match = _RESULT.match(line)
        if not match or match.group(2) in _NO_COPY.split():
            continue
        sizes = [math.prod(int(d) for d in dims.split(",") if d) for dims in _SHAPE.findall(match.group(1))]
        if any(size in whole for size in sizes):
            found.append(line.strip()[:300])
    return found
