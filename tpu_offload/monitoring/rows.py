"""The panels of the dashboard, row by row, in the order in which someone looks at night.

The first row says whether something is wrong; those below say what. Sums over all selected engines show how useful the
tier is; lines for each engine show which one is unwell.
"""

from tpu_offload.monitoring.panels import (
    ENGINE,
    TIER,
    Panel,
    Query,
    Row,
    Unit,
    gauge_of_engine,
    gauge_of_tier,
    increase_of_engine,
    quantile,
    rate,
    rate_of_engine,
    rate_of_tier,
    share,
    stat,
)

_HOST_HITS = share("found_tokens", "looked_up_tokens")
_HBM_HITS = share("vllm.prefix_cache_hits", "vllm.prefix_cache_queries")
_FAILURES = (
    "sum(increase({num_failed_jobs}[1h])) + sum(increase({num_rejected_reports}[1h]))"
    " + sum(increase({num_lost_results}[1h])) + sum(increase({failed_storage_chunks}[1h]))"
    " + sum(increase({num_failed_storage_lookups}[1h]))"
)
_GLANCE = Row(
    title="Is something wrong?",
    panels=(
        stat("Open breakers", "Kinds of copies that keep failing and are suspended. Should be 0. Requests are served "
              "without them.", Unit.COUNT, "sum({num_open_breakers})", is_bad=1),
        stat("Failures in 1 h", "Failed copies, those of storage too, rejected reports and lost results. Should be 0.",
              Unit.COUNT, _FAILURES, is_bad=0.5),
        stat("Chunks in quarantine", "Host memory that a timed-out copy may still write. Should return to 0.",
              Unit.COUNT, "sum({num_quarantined_chunks})", is_bad=1),
        stat("Host tier full", "Share of its slots that hold chunks. A full tier is normal once the engine is warm.",
              Unit.SHARE, "sum({num_resident_chunks}) / sum({num_host_chunks})"),
        stat("Hit rate of the host tier", "Of the tokens looked up after those found in HBM, the share that the host "
              "tier has.", Unit.SHARE, _HOST_HITS),
        stat("Hit rate of HBM", "vLLM's prefix cache in HBM: hits of the tokens queried.", Unit.SHARE, _HBM_HITS),
        stat("Loaded", "Bytes loaded from host memory into HBM, a second.", Unit.BYTES_PER_S, rate("loaded_nbytes")),
        stat("Saved", "Bytes saved from HBM to host memory, a second.", Unit.BYTES_PER_S, rate("saved_nbytes")),
    ),
)  # fmt: skip
_USE = Row(
    title="Is it useful?",
    panels=(
        Panel(
            title="Where prompt tokens came from",
            help="local_compute: prefilled. local_cache_hit: found in HBM. external_kv_transfer: loaded by the "
            "connector, from host memory or storage. What is not computed is saved.",
            unit=Unit.PER_S,
            queries=(Query(rate("vllm.prompt_tokens_by_source", "source"), "{{source}}"),),
            stacked=True,
        ),
        Panel(
            title="Hit rates",
            help="HBM: of all prompt tokens. Host tier: of those looked up there, which HBM does not have. Used: what "
            "vLLM took from the connector. If used is far below the host tier's, loads wait for room or are suspended.",
            unit=Unit.SHARE,
            queries=(
                Query(_HBM_HITS, "HBM"),
                Query(_HOST_HITS, "host tier"),
                Query(share("vllm.external_prefix_cache_hits", "vllm.external_prefix_cache_queries"), "used"),
            ),
        ),
        Panel(
            title="Looked up, found, loaded",
            help="Tokens a second. Matched below found: no room in the staging buffer, or loads suspended. Loaded "
            "below matched: loads fail. Skipped: computing them was estimated to be faster.",
            unit=Unit.PER_S,
            queries=(
                Query(rate("looked_up_tokens"), "looked up"),
                Query(rate("found_tokens"), "found"),
                Query(rate("matched_tokens"), "matched"),
                Query(rate("loaded_tokens"), "loaded"),
                Query(rate("skipped_load_tokens"), "skipped"),
            ),
        ),
        Panel(
            title="Time to first token",
            help="vLLM's, of all requests.",
            unit=Unit.SECONDS,
            queries=(
                Query(quantile(0.5, "vllm.time_to_first_token_bucket"), "p50"),
                Query(quantile(0.99, "vllm.time_to_first_token_bucket"), "p99"),
            ),
        ),
        Panel(
            title="KV cache in HBM",
            help="vLLM's share of KV blocks in use, of each engine. Near 1 requests are preempted.",
            unit=Unit.SHARE,
            queries=(Query(gauge_of_engine("vllm.kv_cache_usage"), f"in use {ENGINE}"),),
        ),
        Panel(
            title="Preemptions",
            help="Requests a second whose blocks vLLM took away.",
            unit=Unit.PER_S,
            queries=(Query(rate_of_engine("vllm.preemptions"), ENGINE),),
        ),
    ),
)
_COPIES = Row(
    title="Copies between HBM and host memory",
    panels=(
        Panel(
            title="Bytes copied",
            help="Over all devices, a second, of finished copies.",
            unit=Unit.BYTES_PER_S,
            queries=(Query(rate("saved_nbytes"), "saved"), Query(rate("loaded_nbytes"), "loaded")),
        ),
        Panel(
            title="Blocks copied",
            help="Blocks a second, of finished copies.",
            unit=Unit.PER_S,
            queries=(Query(rate("saved_blocks"), "saved"), Query(rate("loaded_blocks"), "loaded")),
        ),
        Panel(
            title="Bandwidth of copies",
            help="Bytes of finished copies by their duration, over all devices. Durations end when a step sees the "
            "copy finished, so this is a lower bound.",
            unit=Unit.BYTES_PER_S,
            queries=(
                Query(share("saved_nbytes", "save_s"), "saves"),
                Query(share("loaded_nbytes", "load_s"), "loads"),
            ),
        ),
        Panel(
            title="Duration of loads",
            help="From dispatch until seen finished; no shorter than a step. Mean: over the same time.",
            unit=Unit.SECONDS,
            queries=(
                Query(quantile(0.5, "load_duration.bucket"), "p50"),
                Query(quantile(0.99, "load_duration.bucket"), "p99"),
                Query(share("load_duration.sum", "load_duration.count"), "mean"),
            ),
        ),
        Panel(
            title="Duration of saves",
            help="As for loads. No request waits for a save, but for the memory that it holds.",
            unit=Unit.SECONDS,
            queries=(
                Query(quantile(0.5, "save_duration.bucket"), "p50"),
                Query(quantile(0.99, "save_duration.bucket"), "p99"),
                Query(share("save_duration.sum", "save_duration.count"), "mean"),
            ),
        ),
        Panel(
            title="Copies in flight",
            help="Planned, or waiting for room, and not ended.",
            unit=Unit.COUNT,
            queries=(Query(gauge_of_engine("num_jobs_in_flight"), ENGINE),),
        ),
    ),
)
_TIER_ROW = Row(
    title="Host tier",
    panels=(
        Panel(
            title="Occupancy",
            help="Slots are allocated in the background after the start. Window chunks are slots that the windows of "
            "checkpoints take.",
            unit=Unit.COUNT,
            queries=(
                Query("sum({num_host_chunks})", "slots"),
                Query("sum({num_resident_chunks})", "chunks"),
                Query("sum({num_window_chunks})", "window chunks"),
            ),
        ),
        Panel(
            title="Evictions",
            help="A second. A full tier evicts as much as it saves. If it is replaced within minutes and the hit rate "
            "is low, it is too small.",
            unit=Unit.PER_S,
            queries=(
                Query(rate_of_engine("num_evicted_chunks"), f"chunks {ENGINE}"),
                Query(rate_of_engine("num_evicted_checkpoints"), f"checkpoints {ENGINE}"),
            ),
        ),
        Panel(
            title="Checkpoints and states",
            help="Of models with sliding windows or states; 0 for others. Segments of memory move between chunks and "
            "states.",
            unit=Unit.COUNT,
            queries=(
                Query("sum({num_checkpoints})", "checkpoints"),
                Query("sum({num_states})", "states"),
                Query("sum({num_host_states})", "slots for states"),
                Query("sum(increase({num_moved_segments}[$__rate_interval]))", "moved segments"),
            ),
        ),
    ),
)
_ROOM = Row(
    title="Room: staging buffer and drops",
    panels=(
        Panel(
            title="Staging buffer",
            help="Blocks in use, their peak since the start, and the budget. Direct copies use none.",
            unit=Unit.COUNT,
            queries=(
                Query(gauge_of_engine("staging_reserved_blocks"), f"in use {ENGINE}"),
                Query(gauge_of_engine("staging_peak_blocks"), f"peak {ENGINE}"),
                Query(gauge_of_engine("staging_budget_blocks"), f"budget {ENGINE}"),
            ),
        ),
        Panel(
            title="Drops",
            help="A second. Saves: never saved, for lack of room. Loads: in the host tier, but recomputed. At a steady "
            "rate look for open breakers, then enlarge the staging buffer or the host tier.",
            unit=Unit.PER_S,
            queries=(
                Query(rate_of_engine("dropped_save_blocks"), f"save blocks {ENGINE}"),
                Query(rate_of_engine("dropped_load_blocks"), f"load blocks {ENGINE}"),
                Query(rate_of_engine("num_dropped_checkpoints"), f"checkpoints {ENGINE}"),
            ),
        ),
        Panel(
            title="Deferred saves",
            help="Blocks a second whose save was put off to a later step. Some are normal under load.",
            unit=Unit.PER_S,
            queries=(Query(rate_of_engine("deferred_save_blocks"), ENGINE),),
        ),
    ),
)
_FAULTS = Row(
    title="Failures",
    panels=(
        Panel(
            title="Failed and late copies",
            help="Should be 0. Failed copies include late ones. The log has the reason of each.",
            unit=Unit.COUNT,
            queries=(
                Query(increase_of_engine("num_failed_jobs"), f"failed {ENGINE}"),
                Query(increase_of_engine("num_timed_out_jobs"), f"timed out {ENGINE}"),
            ),
        ),
        Panel(
            title="Breakers and quarantine",
            help="Should be 0. Openings: how often a kind of copy was suspended.",
            unit=Unit.COUNT,
            queries=(
                Query(gauge_of_engine("num_open_breakers"), f"open breakers {ENGINE}"),
                Query(increase_of_engine("num_breaker_openings"), f"openings {ENGINE}"),
                Query(gauge_of_engine("num_quarantined_chunks"), f"quarantined chunks {ENGINE}"),
            ),
        ),
        Panel(
            title="Workers",
            help="Restarts empty the host tier. Rejected and lost should be 0; a few ignored results after a time-out "
            "are normal.",
            unit=Unit.COUNT,
            queries=(
                Query(increase_of_engine("num_worker_restarts"), f"restarts {ENGINE}"),
                Query(increase_of_engine("num_rejected_reports"), f"rejected reports {ENGINE}"),
                Query(increase_of_engine("num_lost_results"), f"lost results {ENGINE}"),
                Query(increase_of_engine("num_ignored_results"), f"ignored results {ENGINE}"),
            ),
        ),
    ),
)
_STORAGE = Row(
    title="Storage tiers (empty without one)",
    panels=(
        Panel(
            title="Records by tier",
            help="What each storage tier holds, and has room for; all: also records that two tiers have, twice.",
            unit=Unit.COUNT,
            queries=(
                Query(gauge_of_tier("num_stored_chunks"), TIER),
                Query(gauge_of_tier("num_storage_chunks"), f"room in {TIER}"),
                Query("sum({num_stored_chunks})", "all"),
                Query("sum({num_storage_chunks})", "room in all"),
                Query("sum({restored_chunks})", "found at the start"),
            ),
        ),
        Panel(
            title="Written and read by tier",
            help="Chunks and states a second.",
            unit=Unit.PER_S,
            queries=(
                Query(rate_of_tier("cascaded_chunks"), f"written {TIER}"),
                Query(rate_of_tier("promoted_chunks"), f"read {TIER}"),
            ),
        ),
        Panel(
            title="Failures by tier",
            help="Should be 0. Failed chunks a second; open breakers: copies of that tier are suspended.",
            unit=Unit.COUNT,
            queries=(
                Query(rate_of_tier("failed_storage_chunks"), f"failed chunks {TIER}"),
                Query(gauge_of_tier("num_open_breakers"), f"open breakers {TIER}"),
            ),
        ),
        Panel(
            title="Bytes of storage",
            help="Over all devices and tiers, a second.",
            unit=Unit.BYTES_PER_S,
            queries=(Query(rate("cascaded_nbytes"), "written"), Query(rate("promoted_nbytes"), "read")),
        ),
        Panel(
            title="Chunks of storage",
            help="All tiers together, a second. Admission: kept out. Missing: a shared server had evicted them.",
            unit=Unit.PER_S,
            queries=(
                Query(rate("cascaded_chunks"), "written"),
                Query(rate("promoted_chunks"), "read"),
                Query(rate("num_evicted_storage_chunks"), "evicted"),
                Query(rate("rejected_storage_chunks"), "kept out by admission"),
                Query(rate("missing_storage_chunks"), "missing"),
                Query(rate("failed_storage_chunks"), "failed"),
            ),
        ),
        Panel(
            title="Tokens read from storage",
            help="Tokens of full attention a second.",
            unit=Unit.PER_S,
            queries=(Query(rate("promoted_tokens"), "read"),),
        ),
        Panel(
            title="Not written, not read",
            help="A second. At a steady rate storage is slower than saves or evictions. Skipped: computing was "
            "estimated to be faster.",
            unit=Unit.PER_S,
            queries=(
                Query(rate("dropped_cascade_chunks"), "not written on save"),
                Query(rate("dropped_demotion_chunks"), "not written on eviction"),
                Query(rate("num_dropped_promotions"), "not read, no room"),
                Query(rate("num_skipped_promotions"), "not read, skipped"),
            ),
        ),
        Panel(
            title="Lookups in shared tiers",
            help="Records asked for and found, and lookups that failed, a second. Gone: it was stored before.",
            unit=Unit.PER_S,
            queries=(
                Query(rate("looked_up_storage_chunks"), "asked for"),
                Query(rate("found_storage_chunks"), "found"),
                Query(rate("vanished_storage_chunks"), "gone"),
                Query(rate("num_failed_storage_lookups"), "failed"),
            ),
        ),
    ),
)
_SWAP = Row(
    title="Request swap (not in vLLM, which recomputes)",
    collapsed=True,
    panels=(
        Panel(
            title="Preempted requests",
            help="A second. No room: enlarge the swap pool. Thrashed: swapped out again within 32 steps; HBM is too "
            "small for so many requests.",
            unit=Unit.PER_S,
            queries=(
                Query(rate("num_swapped_out"), "swapped out"),
                Query(rate("num_swapped_in"), "swapped in"),
                Query(rate("num_lost_swaps"), "lost"),
                Query(rate("num_recomputed"), "recomputed"),
                Query(rate("num_recomputed_no_room"), "recomputed, no room"),
                Query(rate("num_recomputed_faster"), "recomputed, faster"),
                Query(rate("num_thrashed_swaps"), "thrashed"),
            ),
        ),
        Panel(
            title="Swap pool",
            help="Blocks.",
            unit=Unit.COUNT,
            queries=(
                Query("sum({swap_pool_blocks})", "size"),
                Query("sum({swap_held_blocks})", "in use"),
                Query("sum({swap_peak_blocks})", "peak"),
            ),
        ),
        Panel(
            title="Swapped-out requests",
            help="Now.",
            unit=Unit.COUNT,
            queries=(Query(gauge_of_engine("num_swapped_requests"), ENGINE),),
        ),
        Panel(
            title="Bytes swapped",
            help="A second; and the rate while swapping, as measured by the library and by these counters.",
            unit=Unit.BYTES_PER_S,
            queries=(
                Query(rate("swapped_out_nbytes"), "out"),
                Query(rate("swapped_in_nbytes"), "in"),
                Query(share("swapped_out_nbytes", "swap_out_s"), "out, while swapping"),
                Query(share("swapped_in_nbytes", "swap_in_s"), "in, while swapping"),
                Query("avg({swap_out_nbytes_per_s})", "out, measured"),
                Query("avg({swap_in_nbytes_per_s})", "in, measured"),
            ),
        ),
        Panel(
            title="Blocks swapped",
            help="A second. Skipped: already in the host tier or the swap pool, or still in HBM.",
            unit=Unit.PER_S,
            queries=(
                Query(rate("swapped_out_blocks"), "out"),
                Query(rate("swapped_in_blocks"), "in"),
                Query(rate("swap_skipped_blocks"), "skipped"),
            ),
        ),
        Panel(
            title="Measured prefill rate",
            help="What a swap is compared with.",
            unit=Unit.PER_S,
            queries=(Query("avg({prefill_tokens_per_s})", "prefill"),),
        ),
    ),
)

ROWS = (_GLANCE, _USE, _COPIES, _TIER_ROW, _ROOM, _FAULTS, _STORAGE, _SWAP)
"""All rows, from top to bottom."""
