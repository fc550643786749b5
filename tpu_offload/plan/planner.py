"""From a model, a machine and the flags of `vllm serve` to a plan: what fits, what it holds, and what pays."""

import dataclasses
import math
from collections.abc import Iterator
from typing import final

from tpu_offload.errors import InputError
from tpu_offload.plan.break_even import MFU_RANGE, Range, break_even, least_prefix
from tpu_offload.plan.machines import Machine, machines_by_size
from tpu_offload.plan.model import WEIGHT_BITS, ModelShape
from tpu_offload.plan.vllm_blocks import (
    CachePlan,
    Serving,
    default_block_size,
    has_several_full_groups,
    least_block_size,
    num_attention_ranks,
    page_nbytes,
    plan_caches,
)
from tpu_offload.storage import STORAGE_TIERS

_GB = 2**30
_HOST_RESERVE_NBYTES = 8 * _GB  # of vLLM's processes on a host
_LEAST_COPY_NBYTES = 4 << 20  # per device and page group, the bound that the connector reports
PREFIXES = (2_048, 8_192, 32_768, 131_072)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user asks for; None is a default.

    Attributes:
      num_devices: `--tensor-parallel-size`; all devices of the machine.
      num_ranks: data-parallel ranks of the attention; with latent attention one a device, else 1.
      max_tokens: `--max-model-len`; what the model was made for.
      max_requests: `--max-num-seqs`.
      step_tokens: `--max-num-batched-tokens`.
      block_size: `--block-size`; tpu-inference's choice.
      kv_nbytes: bytes of a cached number.
      hbm_share: `--gpu-memory-utilization`.
      host_share: part of a host's memory for the host tier.
    """

    num_devices: int | None = None
    num_ranks: int | None = None
    max_tokens: int | None = None
    max_requests: int = 256
    step_tokens: int = 1024
    block_size: int | None = None
    kv_nbytes: int = 2
    hbm_share: float = 0.9
    host_share: float = 0.8


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierRate:
    """How fast a tier is, and from which prefix on it pays.

    Attributes:
      name: the tier.
      nbytes_per_s: into HBM, over the chips of one rank.
      least_tokens: for the ends of `MFU_RANGE`, the shortest prefix that loads faster than it computes; None for none.
    """

    name: str
    nbytes_per_s: float
    least_tokens: tuple[int | None, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan. Bytes are over all devices unless they say otherwise.

    Attributes:
      model, machine, serving: what it is for.
      num_hosts: hosts in use.
      hbm_share: `--gpu-memory-utilization`.
      hbm_limit_nbytes: HBM of the devices in use.
      weight_nbytes: of the weights, with the copies that ranks need.
      kv_hbm_nbytes: HBM that is left for KV and states.
      caches: vLLM's blocks; None if not even one request fits.
      why_not: why the model does not fit, and what does; empty if it fits.
      token_nbytes: KV of one token in the layers with full attention, in the devices of one rank.
      window_nbytes: KV that a hit loads of the layers with a window.
      state_nbytes: of one state.
      kv_copies: how much larger pages are than the KV in them: with fewer KV heads than devices it is stored several
        times, and with 8 bits the two rows of a single head are padded to four.
      block_nbytes: of a block of vLLM's pool, in the devices of one rank.
      copy_hbm_nbytes: HBM that direct copies take, per device.
      staged_hbm_nbytes: HBM that staged copies of 8,192 tokens would take, per device.
      host_gb: `TPU_OFFLOAD_HOST_GB`, on each host.
      host_tokens: tokens that the host tiers hold, without windows and with half of the memory for states.
      break_even: per prefix in tokens, bytes per second from which on a load is faster than a prefill.
      tiers: what is known of host memory and storage.
    """

    model: ModelShape
    machine: Machine
    serving: Serving
    num_hosts: int
    hbm_share: float
    hbm_limit_nbytes: int
    weight_nbytes: float
    kv_hbm_nbytes: int
    caches: CachePlan | None
    why_not: str
    token_nbytes: float
    window_nbytes: float
    state_nbytes: int
    kv_copies: float
    block_nbytes: int
    copy_hbm_nbytes: int
    staged_hbm_nbytes: int
    host_gb: int
    host_tokens: int
    break_even: dict[int, Range]
    tiers: tuple[TierRate, ...]

    @property
    def hbm_kv_tokens(self) -> int:
        """Tokens that vLLM's KV cache holds; 0 if the model does not fit."""
        return self.caches.num_tokens if self.caches else 0


def make_plan(model: ModelShape, machine: Machine, options: PlanOptions) -> Plan:
    """Plans one model on one machine.

    Raises:
      InputError: a flag contradicts the model or the machine.
    """
    serving = _serving(model, machine, options)
    num_hosts = -(-serving.num_devices // (machine.num_devices // machine.num_hosts))
    weights, kv_hbm = _memory(model, machine, serving, options.hbm_share)
    caches, why_not = _caches(model, machine, serving, kv_hbm, hbm_share=options.hbm_share)
    if caches is None:
        why_not += _suggestion(model, options)
    token_nbytes, window_nbytes, kv_copies = _sizes(model, serving)
    num_shards = serving.num_devices // serving.num_ranks
    block_nbytes = caches.block_nbytes if caches else round(token_nbytes * serving.block_size)
    host_gb = int(max(0, machine.host_nbytes - _HOST_RESERVE_NBYTES) * options.host_share / _GB)
    state_nbytes = model.states.nbytes if model.states else 0
    num_chips = serving.num_devices / machine.chip.num_devices
    return Plan(
        model=model,
        machine=machine,
        serving=serving,
        num_hosts=num_hosts,
        hbm_share=options.hbm_share,
        hbm_limit_nbytes=serving.num_devices * machine.chip.hbm_nbytes,
        weight_nbytes=weights,
        kv_hbm_nbytes=kv_hbm,
        caches=caches,
        why_not=why_not,
        token_nbytes=token_nbytes,
        window_nbytes=window_nbytes,
        state_nbytes=state_nbytes,
        kv_copies=kv_copies,
        block_nbytes=block_nbytes,
        copy_hbm_nbytes=max(round(2 * block_nbytes / num_shards), _LEAST_COPY_NBYTES, 2 * state_nbytes // num_shards),
        staged_hbm_nbytes=round((-(-8192 // serving.block_size) + 1) * block_nbytes / num_shards),
        host_gb=host_gb,
        host_tokens=int(host_gb * _GB * num_hosts * (0.5 if state_nbytes else 1) / token_nbytes),
        break_even=_break_even(model, machine, serving, num_chips, kv_copies),
        tiers=_tiers(model, machine, serving, num_chips, kv_copies, num_hosts=num_hosts),
    )


def _sizes(model: ModelShape, serving: Serving) -> tuple[float, float, float]:
    """Bytes of a token's KV of full length, of the windows before a boundary, and how much larger pages are than KV."""
    is_full = {layers: not layers.window or model.ignores_windows or serving.one_group for layers in model.attention}
    per_token = {layers: page_nbytes(layers, serving) / serving.block_size for layers in model.attention}
    token_nbytes = sum(layers.count * per_token[layers] for layers in model.attention if is_full[layers])
    window_nbytes = sum(
        layers.count * per_token[layers] * min(layers.window - 1, serving.max_tokens)
        for layers in model.attention
        if not is_full[layers]
    )
    first = model.attention[0]
    return token_nbytes, window_nbytes, per_token[first] / (first.cached_width * serving.kv_nbytes)


def _serving(model: ModelShape, machine: Machine, options: PlanOptions) -> Serving:
    num_devices = machine.num_devices if options.num_devices is None else options.num_devices
    if num_devices > machine.num_devices:
        raise InputError(f"--tensor-parallel {num_devices} on {machine.name}, which has {machine.num_devices} devices")
    num_heads = model.attention[0].num_heads
    if num_heads % num_devices:
        raise InputError(
            f"{model.name} has {num_heads} query heads, which vLLM does not divide over {num_devices} devices; "
            "expected a --tensor-parallel that divides them"
        )
    num_ranks = options.num_ranks or (num_devices if model.is_latent else 1)
    if num_devices % num_ranks:
        raise InputError(f"--attention-ranks {num_ranks} of {num_devices} devices; expected a divisor of them")
    if model.is_latent and num_ranks < num_devices:
        raise InputError(
            f"--attention-ranks {num_ranks} with latent attention; tpu-inference 0.32 serves it with a rank a device, "
            f"so expected {num_devices}"
        )
    max_tokens = options.max_tokens or model.max_tokens
    _check_lengths(model, options, max_tokens)
    block_size = options.block_size or default_block_size(
        model, max_tokens=max_tokens, max_requests=options.max_requests
    )
    return Serving(
        num_devices=num_devices,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        max_requests=options.max_requests,
        step_tokens=options.step_tokens,
        block_size=block_size,
        kv_nbytes=options.kv_nbytes,
        one_group=has_several_full_groups(model),
    )


def _check_lengths(model: ModelShape, options: PlanOptions, max_tokens: int) -> None:
    """Refuses what vLLM or the kernels would refuse."""
    if max_tokens > model.max_tokens:
        raise InputError(
            f"--max-model-len {max_tokens}, and {model.name} was made for {model.max_tokens}; vLLM refuses more"
        )
    if options.step_tokens < options.max_requests:
        raise InputError(
            f"--max-num-batched-tokens {options.step_tokens} with --max-num-seqs {options.max_requests}; vLLM wants at "
            "least a token for each"
        )
    least = least_block_size(max_tokens=max_tokens, max_requests=options.max_requests)
    if options.block_size and not model.is_latent and options.block_size < least:
        raise InputError(
            f"--block-size {options.block_size}: the block tables of {options.max_requests} requests of {max_tokens} "
            f"tokens do not fit into the scalar memory; expected at least {least}, or fewer --max-num-seqs"
        )


def _memory(model: ModelShape, machine: Machine, serving: Serving, hbm_share: float) -> tuple[float, int]:
    """Bytes of the weights, and HBM that is left for KV."""
    weights = model.weight_nbytes(attention_copies=serving.num_ranks)
    return weights, int(serving.num_devices * machine.chip.hbm_nbytes * hbm_share - weights)


def _caches(
    model: ModelShape, machine: Machine, serving: Serving, kv_hbm_nbytes: int, *, hbm_share: float
) -> tuple[CachePlan | None, str]:
    """vLLM's blocks, or why there are none."""
    if kv_hbm_nbytes <= 0:
        weights = model.weight_nbytes(attention_copies=serving.num_ranks)
        hbm = serving.num_devices * machine.chip.hbm_nbytes * hbm_share
        return None, (
            f"the weights ({model.weight_bits.name}) take {weights / _GB:,.0f} GiB, and {hbm_share:g} of the HBM of "
            f"{serving.num_devices} devices of {machine.name} is {hbm / _GB:,.0f}"
        )
    try:
        return plan_caches(model, serving, available_nbytes=kv_hbm_nbytes), ""
    except InputError as e:
        return None, str(e)


def _suggestion(model: ModelShape, options: PlanOptions) -> str:
    """The smallest machine on which the model fits with all its devices, if need be with weights of 8 bits."""
    free = dataclasses.replace(options, num_devices=None, num_ranks=None)
    without = " without --attention-ranks" if options.num_ranks and options.num_ranks > 1 else ""
    in_8_bits = dataclasses.replace(model, weight_bits=WEIGHT_BITS["fp8"])
    eighth = _smallest(in_8_bits, free) if in_8_bits.weight_nbytes() < model.weight_nbytes() else None
    if name := _smallest(model, free):
        said = f"; the smallest machine on which it fits{without} is {name}"
        return said + (f", or {eighth} with --weights fp8" if eighth and eighth != name else "")
    if eighth:
        return f"; with --weights fp8, the smallest machine on which it fits{without} is {eighth}"
    return "; it fits on no machine of up to 64 chips: lower --max-model-len or --max-num-seqs"


def _smallest(model: ModelShape, options: PlanOptions) -> str | None:
    for machine in machines_by_size():
        try:
            serving = _serving(model, machine, options)
            _, kv_hbm = _memory(model, machine, serving, options.hbm_share)
            if kv_hbm > 0:
                plan_caches(model, serving, available_nbytes=kv_hbm)
                return machine.name
        except InputError:
            continue
    return None


def _break_even(
    model: ModelShape, machine: Machine, serving: Serving, num_chips: float, kv_copies: float
) -> dict[int, Range]:
    prefixes = [end for end in PREFIXES if end <= serving.max_tokens] or [serving.max_tokens]
    return {
        end: break_even(
            model, machine.chip, num_chips=num_chips, end=end, kv_nbytes=serving.kv_nbytes, kv_copies=kv_copies
        )
        for end in prefixes
    }


def _tiers(
    model: ModelShape, machine: Machine, serving: Serving, num_chips: float, kv_copies: float, *, num_hosts: int
) -> tuple[TierRate, ...]:
    # The KV of one request is on the devices of one rank, and comes over their links. Only their hosts read it.
    link = machine.chip.link_nbytes_per_s * num_chips / serving.num_ranks
    hosts_of_rank = max(1.0, num_hosts / serving.num_ranks)
    network = machine.chip.network_nbytes_per_s * num_chips * hosts_of_rank / num_hosts
    rates = {"host memory": link}
    for name, tier in STORAGE_TIERS.items():
        if tier.read_nbytes_per_s:
            rates[name] = min(link, tier.read_nbytes_per_s * hosts_of_rank)
    rates["a remote store, at most"] = min(link, network)
    return tuple(
        TierRate(
            name=name,
            nbytes_per_s=rate,
            least_tokens=tuple(
                least_prefix(
                    model,
                    machine.chip,
                    num_chips=num_chips,
                    nbytes_per_s=rate,
                    mfu=mfu,
                    most=serving.max_tokens,
                    kv_nbytes=serving.kv_nbytes,
                    kv_copies=kv_copies,
                )
                for mfu in MFU_RANGE
            ),
        )
        for name, rate in rates.items()
    )


def advice(plan: Plan) -> list[str]:
    """What the figures mean, and what they leave out, a line each."""
    lines = [*_advice_on_layers(plan), *_advice_on_memory(plan)]
    lines.append("Weights and HBM are estimates; vLLM's log has the real size (`KV cache size`).")
    return lines


def _advice_on_layers(plan: Plan) -> Iterator[str]:
    model, serving = plan.model, plan.serving
    if plan.kv_copies > 1:
        num_heads, num_shards = model.attention[0].num_kv_heads, serving.num_devices // serving.num_ranks
        padded = ", with padding to 32 bits" if serving.kv_nbytes == 1 else ""
        least = num_attention_ranks(model, num_devices=serving.num_devices, kv_nbytes=serving.kv_nbytes)
        yield (
            f"{num_heads} KV heads over {num_shards} devices take {plan.kv_copies:g} times their size{padded}, in HBM "
            f"and in the host tier; with data-parallel ranks (--attention-ranks {least}) they take it once."
        )
    if serving.one_group:
        yield (
            "More layers have full attention than windows: vLLM would make several groups of them, which the connector "
            "does not run, so the command gives all layers KV of full length."
        )
    if plan.window_nbytes:
        yield (
            "Beside its full-attention KV, each place at which prompts may continue takes "
            f"{plan.window_nbytes / 2**20:,.1f} MiB of window KV in the host tier, which is not in the tokens above."
        )
    if plan.state_nbytes:
        state = plan.state_nbytes / plan.token_nbytes
        yield (
            f"A state takes {plan.state_nbytes / 1e6:,.0f} MB, as much as the KV of {math.ceil(state):,} tokens; half "
            "of the host tier is counted for states."
        )
    if model.weights_changed:
        yield (
            f"{model.repo} has other weights: to serve {model.weight_bits.name}, name a checkpoint that is quantized "
            "so in the command."
        )


def _advice_on_memory(plan: Plan) -> Iterator[str]:
    serving, num_hosts = plan.serving, plan.num_hosts
    if plan.caches and plan.host_tokens < 2 * plan.hbm_kv_tokens:
        yield (
            f"The host tier holds {plan.host_tokens / max(1, plan.hbm_kv_tokens):.1f} times what HBM holds. Below 2 it "
            f"mostly holds the same prompts as HBM: add storage below it (docs/tiers.md), or do not expect much."
        )
    of_hosts = num_hosts * plan.machine.num_devices // plan.machine.num_hosts
    if serving.num_devices < of_hosts:
        yield (
            f"{serving.num_devices} of {of_hosts} devices are used: another engine on the same host needs a part of "
            "its memory, so divide host_gb among them."
        )
    if plan.caches is None:
        return
    free = plan.hbm_limit_nbytes * (1 - plan.hbm_share) / serving.num_devices
    yield (
        f"Copies take {plan.copy_hbm_nbytes / 2**20:,.1f} MiB of the {free / 2**20:,.0f} MiB of HBM per device that "
        "vLLM leaves free, beside activations and programs, whose size is not known here."
    )
