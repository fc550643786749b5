"""The entry point (group `vllm.general_plugins`) that vLLM's plugin loader calls in each of its processes."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tpu_offload.adapters.vllm.stage_start import let_stages_start

CONNECTOR_NAME = "TPUHostOffloadConnector"
"""Differs from tpu-inference's `TPUOffloadConnector`, which may be registered as well."""


def register() -> None:
    """Registers the connector by name, so that `--kv-transfer-config` needs no module path; lets pipeline stages start.

    On TPU, tpu-inference 0.32 accepts only its own four names: use the module path there (docs/vllm.md).
    """
    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # a process may load plugins more than once
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "tpu_offload.adapters.vllm", "TPUOffloadConnector")
    let_stages_start(CONNECTOR_NAME)
