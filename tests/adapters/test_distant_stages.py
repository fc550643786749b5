"""Why pipeline stages on several hosts are refused: facts of vLLM and tpu-inference 0.32, of their own code.

If one of these tests fails, `settings._problem_of_distant_stages` and docs/vllm.md need another look.
"""

import inspect
from types import SimpleNamespace

import pytest
from tpu_inference.distributed import jax_parallel_state
from tpu_inference.executors.ray_distributed_executor_v2 import RayDistributedExecutorV2
from tpu_inference.worker.tpu_worker import PPConfig, TPUWorker
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

pytestmark = pytest.mark.vllm


class Stop(Exception):
    """Ends the start of a worker."""


def arguments_of_worker(monkeypatch, rank):
    """What the default executor for Ray gives the worker of a stage."""
    given = []

    def init_worker(self, all_kwargs):
        given.extend(all_kwargs)
        raise Stop

    monkeypatch.setattr(multiproc_executor.WorkerWrapperBase, "init_worker", init_worker)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2), logging_config=None)
    process = RayWorkerProc(config, rank, input_shm_handle=None, is_driver_worker=True)
    with pytest.raises(Stop):
        process.initialize_worker(local_rank=0, env_vars={}, distributed_init_method="")
    return given[0]


def test_the_default_executor_tells_no_stage_where_the_one_before_it_is(monkeypatch):
    given = arguments_of_worker(monkeypatch, rank=1)
    assert given["rank"] == 1
    parameters = inspect.signature(TPUWorker.__init__).parameters
    addresses = {name: given.get(name, parameters[name].default) for name in ("ip", "prev_worker_ip")}
    assert addresses == {"ip": "localhost", "prev_worker_ip": "localhost"}

    asked: list[str] = []
    server = SimpleNamespace(connect=asked.append)
    monkeypatch.setattr(jax_parallel_state, "_PP", SimpleNamespace(transfer_server=server), raising=False)
    config = SimpleNamespace(sharding_config=SimpleNamespace(total_devices=1))
    monkeypatch.setattr("tpu_inference.tpu_info.get_num_cores_per_chip", lambda: 1)
    worker = SimpleNamespace(rank=1, pp_config=PPConfig(config, 1, **addresses, pp_world_size=2))
    TPUWorker.initialize_pp_transfer_connect(worker)
    assert asked == [f"localhost:{jax_parallel_state.BASE_JAX_PORT}"], "its own host, not that of the stage before"
    assert issubclass(RayDistributedExecutorV2, RayExecutorV2)


def test_compiled_graphs_return_the_output_of_the_last_stage_only(monkeypatch):
    """Each stage is bound to the output of the one before, and only the last one's go to the engine."""
    returned = []

    class MultiOutputNode:
        def __init__(self, outputs):
            returned.extend(outputs)

        def experimental_compile(self, **settings):
            return self

    def worker(name):
        return SimpleNamespace(execute_model_ray=SimpleNamespace(bind=lambda given: (name, given)))

    import ray.dag
    from ray.dag import input_node

    monkeypatch.setattr(ray.dag, "MultiOutputNode", MultiOutputNode)
    monkeypatch.setattr(input_node.InputNode, "__enter__", lambda self: "step")
    monkeypatch.setattr(input_node.InputNode, "__exit__", lambda *exc: None)
    monkeypatch.setenv("VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE", "shm")
    monkeypatch.setenv("VLLM_USE_RAY_WRAPPED_PP_COMM", "0")
    monkeypatch.setenv("RAY_CGRAPH_get_timeout", "300")  # vLLM sets it
    executor = SimpleNamespace(
        pp_tp_workers=[[worker("first")], [worker("last")]],
        parallel_config=SimpleNamespace(use_ray=True),
        _check_ray_cgraph_installation=lambda: None,
    )
    RayDistributedExecutor._compiled_ray_dag(executor, enable_asyncio=False)
    assert returned == [("last", ("first", "step"))]
