"""Hashes of requests with an adapter."""

import os
from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest

from tpu_offload.adapters.vllm.lora_hashes import LoRAHashes

pytestmark = pytest.mark.vllm

KNOWN = [bytes([i]) * 32 for i in range(5)]


def request(path, *, name="a", num_blocks=3):
    lora = LoRARequest("sql", 1, str(path)) if path else None
    return SimpleNamespace(request_id=name, lora_request=lora, block_hashes=KNOWN[:num_blocks])


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(os.urandom(5000))
    return tmp_path


def hashes(path, engine=None):
    return list((engine or LoRAHashes()).of(request(path)))


def test_they_are_those_of_vllm_without_an_adapter():
    assert hashes(None) == KNOWN[:3]


def test_engines_agree_on_an_adapter_wherever_it_is(adapter, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved")
    for file in adapter.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert hashes(adapter) == hashes(adapter) == hashes(moved)
    assert [block_hash[:32] for block_hash in hashes(adapter)] == KNOWN[:3]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_other_files_are_another_adapter(adapter, name):
    before = hashes(adapter)
    (adapter / name).write_bytes(b'{"r": 16}')
    assert set(before).isdisjoint(hashes(adapter))


def test_engines_do_not_agree_on_one_that_is_on_a_hub_or_has_no_config(adapter):
    assert set(hashes("org/adapter")).isdisjoint(hashes("org/adapter"))
    (adapter / "adapter_config.json").unlink()
    assert set(hashes(adapter)).isdisjoint(hashes(adapter))
    engine = LoRAHashes()
    assert hashes("org/adapter", engine) == hashes("org/adapter", engine)


def test_after_files_have_changed_no_two_requests_agree_until_a_reset(adapter, caplog):
    """Nothing says when the engine loads them: before and after that they are different adapters."""
    engine = LoRAHashes()
    first = list(engine.of(request(adapter)))
    (adapter / "adapter_model.safetensors").write_bytes(b"new")
    assert engine.of(request(adapter)) == first, "a request keeps its hashes"
    engine.finish("a")
    seen = set(first) | set(hashes(adapter))
    for num_requests in range(1, 4):
        changed = hashes(adapter, engine)
        assert changed == engine.of(request(adapter)), "a request keeps its hashes"
        engine.finish("a")
        seen |= set(changed)
        assert len(seen) == 6 + 3 * num_requests
    assert caplog.text.count("have changed") == 1
    engine.reset()
    after = hashes(adapter, engine)
    engine.finish("a")
    assert seen.isdisjoint(after)
    assert hashes(adapter, engine) == after
    engine.finish("a")
    engine.reset()
    assert hashes(adapter, engine) == after


def test_a_reset_changes_nothing_of_adapters_that_have_not_changed(adapter):
    engine = LoRAHashes()
    before = hashes(adapter, engine)
    engine.finish("a")
    engine.reset()
    assert hashes(adapter, engine) == before


def test_they_follow_a_request_that_goes_on_with_other_tokens(adapter):
    engine, session = LoRAHashes(), request(adapter)
    digest = engine.of(session)[0][32:]
    for known in (KNOWN, KNOWN[:2], [*KNOWN[:1], *KNOWN[3:]], []):
        session.block_hashes = known
        assert engine.of(session) == [block_hash + digest for block_hash in known]
