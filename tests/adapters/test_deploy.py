"""deploy/gke with the real vLLM: its parser takes the arguments, and the connector the settings."""

import argparse
import importlib.metadata
import json

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploy.manifests import GKE, build, environment, flags, picker_config, server
from tpu_offload.adapters.vllm import TPUOffloadConnector

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def parsed():
    parser = make_arg_parser(FlexibleArgumentParser())
    args = [argument.replace("$(POD_IP)", "10.0.0.7") for argument in server()["args"]]
    return parser.parse_args(args)


def test_vllm_takes_the_arguments(parsed):
    assert parsed.model_tag == server()["args"][0]
    assert (parsed.tensor_parallel_size, parsed.max_model_len, parsed.block_size) == (8, 32768, 64)
    assert parsed.shutdown_timeout == int(flags(server())["--shutdown-timeout"])
    connector = parsed.kv_transfer_config
    assert isinstance(connector, KVTransferConfig)
    assert connector.kv_connector == TPUOffloadConnector.__name__
    assert connector.kv_connector_module_path == "tpu_offload.adapters.vllm"
    assert connector.kv_load_failure_policy == "recompute"
    events = parsed.kv_events_config
    assert isinstance(events, KVEventsConfig)
    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    assert events.topic == "kv@10.0.0.7:8000@Qwen/Qwen3-32B"


def test_vllm_refuses_a_mistake():
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parser.parse_args([*server()["args"], "--shutdown-timeouts=1"])
    events = json.loads(flags(server())["--kv-events-config"]) | {"topics": "kv"}
    with pytest.raises((SystemExit, argparse.ArgumentError, ValueError)):
        parser.parse_args([server()["args"][0], "--kv-events-config", json.dumps(events)])


def test_the_servers_tokenize_for_the_router():
    """llm-d's token-producer asks for these two."""
    from vllm.entrypoints.scale_out.render.api_router import router

    paths = {route.path for route in router.routes}
    assert {"/v1/completions/render", "/v1/chat/completions/render"} <= paths
    plugins = picker_config(build(GKE / "router"))["plugins"]
    assert [plugin["parameters"]["vllm"] for plugin in plugins if plugin["type"] == "token-producer"]


def test_variables_are_those_of_vllm():
    import vllm.envs

    names = {name for name in environment(server()) if name.startswith("VLLM_")}
    assert names == {"VLLM_XLA_CACHE_PATH"}
    assert names <= vllm.envs.environment_variables.keys()


def closure(name, found):
    """Packages that a package brings with it."""
    name = canonicalize_name(name)
    if name in found:
        return found
    try:
        required = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(name)
    for one in map(Requirement, required):
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            closure(one.name, found)
    return found


def test_what_it_adds_to_a_serving_environment():
    """docs/deploy.md has the list and the sizes."""
    base = closure("vllm-tpu", set())
    assert len(base) > 100
    assert closure("tpu_offload", set()) - base == {"tpu-offload", "xxhash"}
