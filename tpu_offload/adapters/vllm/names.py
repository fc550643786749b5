"""The names under which vLLM's configuration has this connector."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR_NAME = "TPUHostOffloadConnector"
"""Registered by the plugin. Differs from tpu-inference's `TPUOffloadConnector`, which may be registered as well."""

MODULE_PATH = "tpu_offload.adapters.vllm"


def has_this_connector(vllm_config: "VllmConfig") -> bool:
    """Whether an engine uses this connector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    path = transfer.kv_connector_module_path or ""
    return transfer.kv_connector == CONNECTOR_NAME or path == MODULE_PATH or path.startswith(f"{MODULE_PATH}.")
