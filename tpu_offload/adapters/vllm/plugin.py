"""The entry point (group `vllm.general_plugins`) that vLLM's plugin loader calls in each of its processes."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tpu_offload.adapters.vllm.names import CONNECTOR_NAME, MODULE_PATH
from tpu_offload.adapters.vllm.rank_reports import join_reports_for_ranks
from tpu_offload.adapters.vllm.stage_start import let_stages_start


def register() -> None:
    """Registers the connector by name, so that `--kv-transfer-config` needs no module path; idempotent.

    On TPU, tpu-inference 0.32 accepts only its own four names: use the module path there (docs/vllm.md). What engines
    with this connector need before vLLM makes any connector is also done here.
    """
    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # a process may load plugins more than once
        KVConnectorFactory.register_connector(CONNECTOR_NAME, MODULE_PATH, "TPUOffloadConnector")
    join_reports_for_ranks()
    let_stages_start()
