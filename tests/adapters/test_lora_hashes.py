"""Hashes of requests with an adapter, above storage."""

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
    return list((engine or LoRAHashes(enabled=True)).of(request(path)))


def test_they_are_those_of_vllm_without_an_adapter_or_storage(adapter):
    assert hashes(None) == KNOWN[:3]
    assert hashes(adapter, LoRAHashes(enabled=False)) == KNOWN[:3]


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
    engine = LoRAHashes(enabled=True)
    assert hashes("org/adapter", engine) == hashes("org/adapter", engine)


def test_files_that_change_while_the_engine_runs_match_those_of_no_engine(adapter):
    engine = LoRAHashes(enabled=True)
    first = list(engine.of(request(adapter)))
    (adapter / "adapter_model.safetensors").write_bytes(b"new")
    assert engine.of(request(adapter)) == first, "a request keeps its hashes"
    engine.finish("a")
    changed = hashes(adapter, engine)
    assert set(changed).isdisjoint([*first, *hashes(adapter)])
    engine.finish("a")
    assert hashes(adapter, engine) == changed


def test_they_follow_a_request_that_goes_on_with_other_tokens(adapter):
    engine, session = LoRAHashes(enabled=True), request(adapter)
    digest = engine.of(session)[0][32:]
    for known in (KNOWN, KNOWN[:2], [*KNOWN[:1], *KNOWN[3:]], []):
        session.block_hashes = known
        assert engine.of(session) == [block_hash + digest for block_hash in known]
