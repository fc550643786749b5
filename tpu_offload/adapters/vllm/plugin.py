"""What vLLM's plugin loader calls in each of its processes (entry point group `vllm.general_plugins`)."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTOR_NAME = "TPUHostOffloadConnector"
"""Not tpu-inference's `TPUOffloadConnector`, which may be registered beside it."""


def register() -> None:
    """Makes the connector known by name, so that `--kv-transfer-config` needs no module path.

    tpu-inference 0.32 refuses every name but its own four on TPU; there the module path is the way (docs/vllm.md).
    """
    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # a process may load plugins more than once
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "tpu_offload.adapters.vllm", "TPUOffloadConnector")
