"""One workload without and with offloading.

Both runs use the same weights, the same HBM size and the same order of conversations, after both
engines have compiled. HBM is made too small for the workload on purpose.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import InputError, TransferError
from tpu_offload.measure import Geometry, measure_copy_rates
from tpu_offload.metrics import OffloadStats
from tpu_offload.replay.comparison import find_differences, hit_ttfts, offload_numbers, outcome, run_numbers
from tpu_offload.replay.setup import (
    ServingOptions,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    serve_once,
)

_logger = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 3


def size_setup(options: ServingOptions, offload: OffloadConfig) -> Setup:
    """Checks options and settings, and sizes HBM and the host tier.

    Raises:
      InputError: an invalid option.
      ConfigError: an invalid setting.
    """
    workload = build_workload(options)
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    needed = blocks_per_request(workload, options.block_size)
    num_unique_blocks = workload.num_unique_blocks(options.block_size)
    # Enough for every request in flight, and too small for the workload; the second if not both can be.
    num_blocks = options.num_blocks or max(needed, min(needed * concurrency, num_unique_blocks // 2))
    setup = build_setup(options, offload, workload=workload, concurrency=concurrency, num_blocks=num_blocks)
    if num_blocks >= num_unique_blocks:
        _logger.warning(
            "HBM of %d blocks holds all %d blocks of the workload, so offloading has nothing to do",
            num_blocks,
            num_unique_blocks,
        )
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        # The default of 1024 chunks suits no workload in particular; a replay knows what it needs.
        offload = offload.model_copy(update={"num_cpu_chunks": -(-num_unique_blocks // offload.blocks_per_chunk)})
    return dataclasses.replace(setup, offload=offload)


def serve_twice(
    setup: Setup, *, start: Callable[[str], Callable[[], None]], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Serves without and with offloading.

    Args:
      setup: what is served, and with which sizes.
      start: called with the name of each run; returns what is called after each of its requests.
      stop: asked before each step.
    Returns:
      The report.
    """
    block_size = setup.engine.block_size
    baseline, _ = serve_once(setup, None, on_finish=start("baseline"), stop=stop)
    offload, stats = serve_once(setup, setup.offload, on_finish=start("offload"), stop=stop)
    differences, num_compared = find_differences(baseline.records, offload.records)
    one = run_numbers(baseline, block_size=block_size)
    other = run_numbers(offload, block_size=block_size) | offload_numbers(stats or OffloadStats())
    if stats and offload.complete:
        other["transfers"]["copy_rates"] = _copy_rates(setup)
    recomputed = one["prompt_tokens"]["recomputed"]
    return {
        **describe(setup),
        **outcome([difference.as_dict() for difference in differences], num_compared),
        "loaded_share_of_recomputed": other["prompt_tokens"]["host"] / recomputed if recomputed else None,
        "host_hits": hit_ttfts(baseline, offload),
        "baseline": one,
        "offload": other,
    }


def _copy_rates(setup: Setup) -> dict[str, Any] | None:
    model = setup.model
    geometry = Geometry(model.num_layers, model.page_shape(setup.engine.block_size), model.kv_dtype)
    try:
        return dataclasses.asdict(measure_copy_rates(setup.offload, geometry))
    except (InputError, TransferError) as e:
        _logger.warning("the copies were not measured alone: %s", e)
        return None
