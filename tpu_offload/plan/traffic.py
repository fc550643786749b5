"""The hit rate that a trace would have with the tiers of a plan."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tpu_offload.errors import InputError
from tpu_offload.plan.planner import Plan
from tpu_offload.sim import Case, Experiment, TierSetup, read_traces, run_all, simulate_hbm

_POLICY = "density"  # the default of TPU_OFFLOAD_EVICTION_POLICY
_OTHER_SIZES = (0.0625, 0.125, 0.25, 0.5, 2.0)  # of the planned one


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Where the prompt tokens of a trace came from, as shares of all.

    Attributes:
      num_requests: requests of the trace.
      prompt_tokens: tokens of their prompts, in whole blocks.
      hbm: found in HBM's prefix cache.
      host: found in the host tier.
      bound: what an unlimited host tier would have found there.
      host_by_tokens: `host` for host tiers of other sizes, by the tokens that they hold; the planned size included.
      saved_flops: part of the prefill's FLOPs that the host tier saves.
    """

    num_requests: int
    prompt_tokens: int
    hbm: float
    host: float
    bound: float
    host_by_tokens: dict[int, float]
    saved_flops: float


def expected_hits(plan: Plan, traces: Sequence[Path], *, block_tokens: int) -> Hits:
    """Simulates the traces with HBM and a host tier of the planned sizes.

    Requests are served one after the other, in order of time; a hit is counted in blocks of the trace.

    Raises:
      InputError: a trace cannot be read or has no block, or the model does not fit.
    """
    if plan.caches is None:
        raise InputError(f"no hit rate without a plan: {plan.why_not}")
    trace = read_traces(list(traces), block_tokens=block_tokens)
    if not trace.num_blocks:
        raise InputError("no request of the trace has a block: every list of hash_ids is empty")
    unique = trace.num_unique_blocks
    hbm = simulate_hbm(trace, max(1, min(unique, plan.hbm_kv_tokens // block_tokens)))
    experiment = Experiment(trace=trace, split=0, only_second=False, hbm_result=hbm)
    num = trace.num_blocks
    planned = max(1, plan.host_tokens // block_tokens)
    # Distinct, so that a tier that holds the whole trace is simulated once.
    sizes = dict.fromkeys(
        max(1, min(unique, size)) for size in (planned, *(int(share * planned) for share in _OTHER_SIZES), unique)
    )
    cases = [Case(_POLICY, size / unique, TierSetup(num_chunks=size)) for size in sizes]
    results = dict(run_all(experiment, cases, num_jobs=1))
    rates = {size: sum(results[i].outcome.host_hits) / num for i, size in enumerate(sizes)}
    saved = whole = 0.0
    for request, in_hbm, in_host in zip(trace.requests, hbm.hits, results[0].outcome.host_hits, strict=True):
        end = len(request.blocks) * block_tokens
        first, loaded = in_hbm * block_tokens, (in_hbm + in_host) * block_tokens
        whole += plan.model.prefill_flops(0, end) if end else 0.0
        saved += plan.model.prefill_flops(first, loaded) if loaded > first else 0.0
    return Hits(
        num_requests=len(trace.requests),
        prompt_tokens=num * block_tokens,
        hbm=sum(hbm.hits) / num,
        host=rates[min(unique, planned)],
        bound=rates[unique],
        host_by_tokens={size * block_tokens: rate for size, rate in sorted(rates.items())},
        saved_flops=saved / whole,
    )
