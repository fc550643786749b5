"""The arithmetic of load against recompute, beside figures that were worked out by hand."""

import dataclasses

import pytest

from tpu_offload.errors import InputError
from tpu_offload.plan import CHIPS, break_even, find_model, least_prefix, prefill_s, prefix_nbytes

V6E = CHIPS["v6e"]
LLAMA_8B, LLAMA_70B, DEEPSEEK_V3 = MODELS = tuple(map(find_model, ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3")))
HYBRIDS = tuple(map(find_model, ("gpt-oss-120b", "gemma-3-27b", "qwen3.5-397b")))

# By prefix: GB/s over all chips at 0.4 and 0.6 of the peak, rounded, for 8B on 1, 4 and 8 chips and 70B on 8.
BY_HAND = {
    2_048: ((2.9, 4.4), (11.6, 17), (23, 35), (6.7, 10)),
    8_192: ((2.6, 4.0), (10.6, 16), (21, 32), (6.3, 9.5)),
    32_768: ((2.0, 2.9), (7.8, 12), (16, 23), (5.2, 7.8)),
    131_072: ((1.0, 1.4), (3.8, 5.7), (7.6, 11), (3.1, 4.6)),
}
COLUMNS = ((LLAMA_8B, 1), (LLAMA_8B, 4), (LLAMA_8B, 8), (LLAMA_70B, 8))


@pytest.mark.parametrize("end", BY_HAND)
def test_it_agrees_with_figures_by_hand(end):
    for (model, num_chips), (low, high) in zip(COLUMNS, BY_HAND[end], strict=True):
        found = break_even(model, V6E, num_chips=num_chips, end=end)
        assert found.low / 1e9 == pytest.approx(low, rel=0.05)
        assert found.high / 1e9 == pytest.approx(high, rel=0.05)


def test_bytes_of_a_token():
    """The latent of 512 and its 64 numbers with positions take 640 in a page."""
    assert [prefix_nbytes(model, end=1) for model in MODELS] == [128 * 1024, 320 * 1024, 61 * 640 * 2]
    assert prefix_nbytes(LLAMA_8B, first=5, end=8, kv_nbytes=1, kv_copies=2) == 3 * 128 * 1024


def test_a_window_is_loaded_once_and_a_state_too():
    gpt_oss, gemma, qwen = HYBRIDS
    # gpt-oss: 18 layers of either kind, 8 KV heads of 64; a window of 128 tokens reaches 127 back.
    assert prefix_nbytes(gpt_oss, end=1000) == 18 * 2 * 8 * 64 * 2 * (1000 + 127)
    assert prefix_nbytes(gpt_oss, end=100) == 18 * 2 * 8 * 64 * 2 * (100 + 100)
    assert prefix_nbytes(gemma, end=5000) == 2 * 16 * 128 * 2 * (10 * 5000 + 52 * 1023)
    assert prefix_nbytes(qwen, end=7) == 15 * 2 * 2 * 256 * 2 * 7 + 45 * (3 * 12288 * 2 + 64 * 128 * 128 * 4)


def test_flops_by_hand():
    """Two tokens after one: each with all parameters, attending to 1 and 2 tokens before, in the middle of a step."""
    layers = dataclasses.replace(LLAMA_8B.attention[0], count=3, num_heads=5, qk_width=7, v_width=11)
    params = dataclasses.replace(LLAMA_8B.params, embedding=4.0, attention=3.0, dense=2.0, active_experts=1.0)
    model = dataclasses.replace(LLAMA_8B, attention=(layers,), params=params)
    assert model.prefill_flops(1, 3) == 2 * 10 * 2 + 2 * 3 * 5 * (7 + 11) * (1.5 + 2.5)


@pytest.mark.parametrize("first", [0, 3, 4, 5, 9])
def test_a_window_limits_what_a_token_attends_to(first):
    """Against a sum over tokens: a token in the middle of its step attends to half a token more."""
    layers = dataclasses.replace(HYBRIDS[0].attention[1], window=4)
    expected = sum(min(token + 0.5, 4) for token in range(first, 12))
    assert layers.num_attended(first, 12) == pytest.approx(expected)


def test_a_latent_is_computed_with_decompressed_heads():
    """128 heads of 192 and 128 wide: at 131,072 tokens attention takes most, and 32 chips need 2.3 GB/s."""
    active = DEEPSEEK_V3.params.active
    flops = DEEPSEEK_V3.prefill_flops(0, 131_072) / 131_072
    assert flops == pytest.approx(2 * active + 2 * 61 * 128 * 320 * 65_536)
    assert break_even(DEEPSEEK_V3, V6E, num_chips=32, end=131_072).low / 1e9 == pytest.approx(2.28, rel=0.01)


@pytest.mark.parametrize("model", HYBRIDS, ids=lambda model: model.name)
def test_longer_prefixes_of_hybrids_need_less_bandwidth(model):
    rates = [break_even(model, V6E, num_chips=8, end=end).low for end in (2_048, 8_192, 32_768, 131_072)]
    assert rates == sorted(rates, reverse=True)


def test_the_parts_of_a_prompt_add_up():
    whole = prefill_s(LLAMA_8B, V6E, num_chips=2, mfu=0.5, first=0, end=9000)
    parts = [
        prefill_s(LLAMA_8B, V6E, num_chips=2, mfu=0.5, first=first, end=end)
        for first, end in ((0, 1000), (1000, 1001), (1001, 9000))
    ]
    assert sum(parts) == pytest.approx(whole)


def test_the_end_of_a_prompt_takes_less_bandwidth_than_its_beginning():
    first, last = (
        break_even(LLAMA_8B, V6E, num_chips=1, first=start, end=start + 1024).low for start in (0, 64 * 1024)
    )
    assert last < first


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_least_prefix_is_where_the_bandwidth_breaks_even(model):
    rate = break_even(model, V6E, num_chips=8, end=20_000, mfu=(0.5, 0.5)).low
    end = least_prefix(model, V6E, num_chips=8, nbytes_per_s=rate * 1.000001, mfu=0.5)
    assert end is not None
    assert abs(end - 20_000) <= 2
    assert least_prefix(model, V6E, num_chips=8, nbytes_per_s=1.0, mfu=0.5) is None
    assert least_prefix(model, V6E, num_chips=8, nbytes_per_s=1e15, mfu=0.5) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mfu": 0.0}, "mfu=0.0; expected a share"),
        ({"mfu": 1.5}, "mfu=1.5"),
        ({"num_chips": 0}, "num_chips=0; expected a number above 0"),
        ({"first": 5, "end": 5}, "tokens 5 to 5 of a prompt"),
        ({"first": -1}, "tokens -1 to 10"),
    ],
)
def test_arguments_out_of_range(changes, message):
    with pytest.raises(InputError, match=message):
        prefill_s(LLAMA_8B, V6E, **({"num_chips": 1, "mfu": 0.5, "first": 0, "end": 10} | changes))
