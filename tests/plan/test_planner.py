"""Plans: what docs/vllm.md works out by hand, what does not fit, and what the flags change."""

import dataclasses
import json
import shlex

import pytest

from tpu_offload.errors import InputError
from tpu_offload.plan import (
    CHIPS,
    PlanOptions,
    advice,
    built_in_models,
    default_block_size,
    find_machine,
    find_model,
    make_plan,
    serve_command,
)

GIB = 2**30
V6E_8 = find_machine("v6e-8")


def plan_of(model, machine="v6e-8", *, weights=None, **options):
    return make_plan(find_model(model, weights=weights), find_machine(machine), PlanOptions(**options))


@pytest.mark.parametrize(
    ("model", "token_kib", "block_mib", "hbm_tokens"),
    [("llama-3.1-8b", 128, 2, 1.7e6), ("llama-3.1-70b", 320, 5, 307_000)],
)
def test_the_arithmetic_of_the_docs(model, token_kib, block_mib, hbm_tokens):
    """docs/vllm.md, Sizing, with its blocks of 16 tokens."""
    plan = plan_of(model, block_size=16, max_tokens=16_384, max_requests=64)
    assert plan.token_nbytes == token_kib * 1024
    assert plan.block_nbytes == block_mib << 20
    assert plan.hbm_kv_tokens == pytest.approx(hbm_tokens, rel=0.02)
    assert plan.copy_hbm_nbytes == max(4 << 20, 2 * plan.block_nbytes // 8)
    assert plan.staged_hbm_nbytes == 513 * plan.block_nbytes // 8


def test_states_by_hand():
    """docs/vllm.md, models with states: an fp8 KV cache, with ranks so that a device has both KV heads."""
    plan = plan_of(
        "qwen3.5-397b", "tpu7x-8", weights="fp8", kv_nbytes=1, block_size=256, num_ranks=8, max_tokens=131_072
    )
    assert plan.state_nbytes == pytest.approx(192e6, rel=0.01)
    assert plan.token_nbytes == 15 * 2 * 2 * 256
    assert plan.token_nbytes * 256 == pytest.approx(3.9e6, rel=0.02)


@pytest.mark.parametrize("name", built_in_models())
def test_every_model_is_planned_or_gets_the_nearest_that_fits(name):
    """What a suggestion names does fit, and nothing smaller of that kind does."""
    plan = plan_of(name)
    if plan.caches is not None:
        assert plan.hbm_kv_tokens > plan.serving.max_tokens
        assert plan.caches.num_blocks * plan.block_nbytes <= plan.kv_hbm_nbytes
        return
    words = plan.why_not.split()
    weights = "fp8" if "with --weights fp8" in plan.why_not else None
    named = next(word.rstrip(",.") for word in words if "-" in word and word.split("-")[0] in CHIPS and word != "v6e-8")
    fits = plan_of(name, named, weights=weights)
    assert fits.caches is not None
    assert fits.hbm_kv_tokens >= fits.serving.max_tokens


def test_fewer_heads_than_devices_are_said():
    plan = plan_of("llama-3.1-8b", "v6e-16")
    assert plan.kv_copies == 2
    assert plan.token_nbytes == 2 * 128 * 1024
    assert any("8 KV heads over 16 devices take 2 times their size, in HBM" in line for line in advice(plan))
    ranks = plan_of("llama-3.1-8b", "v6e-16", num_ranks=2)
    assert (ranks.kv_copies, ranks.token_nbytes) == (1, 128 * 1024)


def test_latent_attention_has_a_rank_a_device():
    plan = plan_of("deepseek-v3", "v5p-64")
    assert plan.serving.num_ranks == plan.serving.num_devices == 32
    assert plan.token_nbytes == 61 * 640 * 2
    with pytest.raises(InputError, match=r"tpu-inference 0\.32 serves it with a rank a device, so expected 32"):
        plan_of("deepseek-v3", "v5p-64", num_ranks=4)


def test_kv_of_one_byte_holds_twice_as_much():
    two, one = plan_of("llama-3.1-8b", "v6e-4"), plan_of("llama-3.1-8b", "v6e-4", kv_nbytes=1)
    assert one.hbm_kv_tokens == pytest.approx(2 * two.hbm_kv_tokens, rel=0.001)
    assert one.host_tokens == 2 * two.host_tokens
    assert one.break_even[8192].low == pytest.approx(two.break_even[8192].low / 2)


def test_kv_of_one_byte_gains_nothing_with_one_head_a_device():
    """Two rows of 8 bits, a key and a value, are padded to the four of 32 bits."""
    two, one = plan_of("llama-3.1-8b"), plan_of("llama-3.1-8b", kv_nbytes=1)
    assert (two.kv_copies, one.kv_copies) == (1, 2)
    assert one.hbm_kv_tokens == two.hbm_kv_tokens
    said = "8 KV heads over 8 devices take 2 times their size, with padding to 32 bits"
    assert any(line.startswith(said) and "--attention-ranks 2" in line for line in advice(one))
    assert plan_of("llama-3.1-8b", kv_nbytes=1, num_ranks=2).kv_copies == 1


def test_a_small_host_tier_is_said():
    plan = plan_of("llama-3.1-8b", "tpu7x-8")
    assert any(line.startswith("The host tier holds 1.0 times") for line in advice(plan))
    assert not any("The host tier holds" in line for line in advice(plan_of("llama-3.1-8b")))


def test_several_hosts_have_a_tier_each():
    one, four = plan_of("llama-3.1-70b"), plan_of("llama-3.1-70b", "v6e-16")
    assert four.machine.num_hosts == 4
    assert four.host_gb == pytest.approx(one.host_gb / 2, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "devices", "hosts", "gib"),
    [
        ("v5e-8", 8, 1, 15.75),
        ("v5e-16", 16, 4, 15.75),
        ("v5p-8", 4, 1, 95),
        ("v5p-16", 8, 2, 95),
        ("v6e-1", 1, 1, 31.25),
        ("v6e-8", 8, 1, 31.25),
        ("v6e-64", 64, 16, 31.25),
        ("tpu7x-8", 8, 1, 96),
        ("tpu7x-16", 16, 2, 96),
    ],
)
def test_machines(machine, devices, hosts, gib):
    found = find_machine(machine)
    assert (found.num_devices, found.num_hosts, found.chip.hbm_nbytes / GIB) == (devices, hosts, gib)
    assert found.hbm_nbytes == devices * gib * GIB


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e", "expected one of v5e-N, v5p-N, v6e-N, tpu7x-N, as v6e-8"),
        ("h100-8", "expected one of v5e-N"),
        ("v6e-3", "is no slice; expected one of v6e-1, v6e-4, v6e-8, v6e-16, v6e-32, v6e-64, v6e-128, v6e-256"),
        ("v5p-4", "is no slice; expected one of v5p-8, v5p-16, v5p-32"),
        ("v5p-9", "is no slice"),
        ("v6e-0", "expected one of v5e-N"),
        ("v6e-08", "expected one of v5e-N"),
        ("v6e-12", "is no slice"),
        ("", "expected one of"),
    ],
)
def test_machines_that_do_not_exist(name, message):
    with pytest.raises(InputError, match=message):
        find_machine(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 9}, "--tensor-parallel 9 on v6e-8, which has 8 devices"),
        ({"num_devices": 6}, "has 32 query heads, which vLLM does not divide over 6 devices; expected a --tensor"),
        ({"max_tokens": 131_073}, "--max-model-len 131073, and llama-3.1-8b was made for 131072"),
        ({"step_tokens": 100}, "--max-num-batched-tokens 100 with --max-num-seqs 256; vLLM wants at least a token"),
        ({"block_size": 16}, "--block-size 16: the block tables of 256 requests of 131072 tokens do not fit"),
        ({"num_ranks": 3}, "--attention-ranks 3 of 8 devices; expected a divisor"),
    ],
)
def test_flags_that_contradict(options, message):
    with pytest.raises(InputError, match=message):
        plan_of("llama-3.1-8b", **options)


def test_states_on_several_hosts():
    plan = plan_of("qwen3.5-397b", "v5p-32")
    assert plan.num_hosts == 4
    assert plan.caches is not None
    assert plan.state_nbytes > 0


def test_a_context_that_does_not_fit():
    plan = plan_of("llama-3.1-8b", "v6e-1", max_requests=64)
    assert plan.caches is None
    assert "one request of 131072 tokens needs " in plan.why_not
    assert "lower --max-model-len or add devices; the smallest machine on which it fits is" in plan.why_not


def test_half_a_host_and_half_a_chip():
    one, two = (plan_of("llama-3.1-8b", "tpu7x-8", num_devices=num) for num in (1, 2))
    assert one.break_even[8192].low == pytest.approx(two.break_even[8192].low / 2)
    assert any("2 of 8 devices are used" in line for line in advice(two))
    part = plan_of("llama-3.1-8b", "v6e-16", num_devices=4)
    assert (part.num_hosts, part.host_tokens) == (1, plan_of("llama-3.1-8b", "v6e-4").host_tokens)
    assert "ray" not in serve_command(part)


def test_other_weights_need_another_checkpoint():
    said = "meta-llama/Llama-3.1-8B-Instruct has other weights: to serve fp8, name a checkpoint"
    assert any(line.startswith(said) for line in advice(plan_of("llama-3.1-8b", weights="fp8")))
    assert not any("other weights" in line for line in advice(plan_of("llama-3.1-8b")))


def test_more_full_layers_than_windows_are_one_group():
    model = find_model("gemma-3-27b")
    full, windows = model.attention
    model = dataclasses.replace(
        model, attention=(dataclasses.replace(full, count=24), dataclasses.replace(windows, count=8))
    )
    plan = make_plan(model, V6E_8, PlanOptions())
    assert "--disable-hybrid-kv-cache-manager" in serve_command(plan)
    assert plan.token_nbytes == 32 * 2 * 16 * 128 * 2
    assert (plan.window_nbytes, len(plan.caches.groups)) == (0, 1)


def test_a_request_is_read_by_the_hosts_of_its_rank():
    """With more ranks than hosts, as many, and fewer."""

    def rates(num_ranks):
        plan = plan_of("qwen3-32b", "v5p-64", num_ranks=num_ranks)
        return {tier.name: tier.nbytes_per_s for tier in plan.tiers}, plan.num_hosts

    (more, num_hosts), (equal, _), (fewer, _) = rates(32), rates(8), rates(4)
    assert num_hosts == 8
    assert more["file"] == equal["file"]
    assert fewer["file"] == 2 * equal["file"]
    network = "a remote store, at most"
    assert 2 * equal[network] == fewer[network]
    assert len(plan_of("llama-3.1-8b", "v6e-16").tiers) == 5


def test_a_suggestion_says_what_it_leaves_out():
    plan = plan_of("qwen3.5-397b", "tpu7x-8", weights="fp8", num_ranks=8)
    assert "the smallest machine on which it fits without --attention-ranks is v5p-16" in plan.why_not
    fits = plan_of("qwen3.5-397b", "tpu7x-8", weights="fp8", num_ranks=8, max_requests=32)
    assert fits.caches is not None


def test_a_window_is_no_longer_than_the_context():
    plan = plan_of("gemma-3-27b", max_tokens=512)
    assert plan.window_nbytes == 52 * 512 * 2 * 16 * 128 * 2


def test_the_command():
    plan = plan_of("deepseek-v3", "v5p-64", kv_nbytes=1, max_tokens=32_768)
    words = shlex.split(serve_command(plan, decode_save=True))
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", "deepseek-ai/DeepSeek-V3"]
    assert flags["--tensor-parallel-size"] == "32"
    assert flags["--kv-cache-dtype"] == "fp8"
    assert flags["--distributed-executor-backend"] == "ray"
    strategy = json.loads(flags["--additional-config"])["sharding"]["sharding_strategy"]
    assert strategy == {"enable_dp_attention": True, "attn_dp_size": 32}
    connector = json.loads(flags["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"host_gb": plan.host_gb, "decode_save": True}
    assert connector["kv_load_failure_policy"] == "recompute"


def test_the_largest_blocks_are_for_the_longest_contexts():
    """Block tables have to fit into scalar memory, so `--max-num-seqs` counts as well."""
    model = find_model("llama-3.1-8b")
    sizes = [
        default_block_size(model, max_tokens=n, max_requests=256) for n in (256, 4096, 8192, 8193, 40_960, 131_072)
    ]
    assert sizes == [16, 256, 256, 32, 128, 256]
    assert default_block_size(model, max_tokens=8193, max_requests=64) == 16
