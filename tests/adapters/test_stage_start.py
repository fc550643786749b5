"""The start of pipeline stages whose model tpu-inference runs with PyTorch."""

from types import SimpleNamespace

import pytest
from tpu_inference.distributed.jax_parallel_state import GroupCoordinator
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state

from tpu_offload.adapters.vllm.names import CONNECTOR_NAME
from tpu_offload.adapters.vllm.plugin import register

pytestmark = pytest.mark.vllm

OURS = {"kv_connector": "TPUOffloadConnector", "kv_connector_module_path": "tpu_offload.adapters.vllm"}
BY_NAME = {"kv_connector": CONNECTOR_NAME, "kv_connector_module_path": None}
ANOTHER = {"kv_connector": "TPUConnector", "kv_connector_module_path": "tpu_inference.distributed.tpu_connector"}


class VLLMGroup:
    """A group of vLLM."""

    def __init__(self):
        self.asked = []

    def broadcast_object(self, obj, src):
        self.asked.append((obj, src))
        return f"{obj} of {src}"


@pytest.fixture
def sync(monkeypatch):
    """vLLM's exchange of `engine_id` between the stages, given their group and the connector."""
    register()

    def run(group, connector, num_stages=2):
        monkeypatch.setattr(parallel_state, "get_tp_group", VLLMGroup)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
        transfer = SimpleNamespace(engine_id="id", **connector)
        parallel = SimpleNamespace(pipeline_parallel_size=num_stages)
        config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
        kv_transfer_state._sync_engine_id_across_tp(config)
        return transfer.engine_id

    return run


def test_the_group_of_tpu_inference_still_cannot_broadcast():
    """If this fails, `let_stages_start` has nothing to do any more: see docs/upstream."""
    assert not hasattr(GroupCoordinator(0, 2), "broadcast_object")


@pytest.mark.parametrize("connector", [OURS, BY_NAME], ids=["module path", "name"])
def test_stages_keep_the_id_that_they_have_if_their_group_cannot_broadcast(sync, connector):
    assert sync(GroupCoordinator(0, 2), connector) == "id"


def test_groups_of_vllm_are_asked(sync):
    group = VLLMGroup()
    assert sync(group, OURS) == "id of 0 of 0"
    assert group.asked == [("id of 0", 0)]
    assert sync(GroupCoordinator(0, 1), OURS, num_stages=1) == "id of 0"


def test_other_connectors_are_left_alone(sync):
    with pytest.raises(AttributeError, match="broadcast_object"):
        sync(GroupCoordinator(0, 2), ANOTHER)


def test_it_is_installed_once():
    register()
    installed = kv_transfer_state._sync_engine_id_across_tp
    register()
    assert kv_transfer_state._sync_engine_id_across_tp is installed
