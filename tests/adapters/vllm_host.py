"""The process of one host: a real tpu-inference worker among several that share one model over `jax.distributed`.

    python -m tests.adapters.vllm_host HOST NUM_HOSTS NUM_DEVICES PORT AVAILABLE_NBYTES FD

It makes the calls that `vllm_hosts.HostsExecutor` sends, in the order in which they arrive.
"""

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-not-found, unused-ignore]

from tests.adapters.vllm_hosts import NodesOfRay


def put_from_one_device() -> None:
    """Has `jax.device_put` accept arrays of one device for the devices of all hosts, as the TPU backend does.

    Every host has the same array, so each makes its part of it.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    put = jax.device_put

    def put_one(leaf: Any, device: Any, **kwargs: Any) -> Any:
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if not isinstance(device, jax.sharding.Sharding) or device.is_fully_addressable or is_global:
            return put(leaf, device, **kwargs)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put_one(jax.random.key_data(leaf), device), impl=jax.random.key_impl(leaf))
        values = np.array(leaf)
        return jax.make_array_from_callback(values.shape, device, lambda index: values[index])

    def device_put(x: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or isinstance(device, jax.sharding.Sharding):
            return jax.tree.map(lambda leaf: put_one(leaf, device, **kwargs), x)
        return put(x, device, **kwargs)

    jax.device_put = device_put


def main() -> None:
    host, num_hosts, num_devices, port, available_nbytes, fd = map(int, sys.argv[1:])
    from tpu_offload.engine.host_process import join_hosts

    join_hosts(host, num_hosts, num_devices=num_devices, port=port)
    import cpu_shim

    cpu_shim.install()
    put_from_one_device()
    NodesOfRay(num_hosts).install()
    import jax
    from tpu_inference.layers.common import utils
    from tpu_inference.worker import tpu_worker

    # On a TPU host the devices of the CPU backend are its own; here the first ones are those of host 0.
    utils._cpu_mesh = jax.sharding.Mesh(jax.local_devices()[:1], ("cpu",))
    all_devices = jax.devices
    jax.devices = lambda backend=None: jax.local_devices() if backend == "cpu" else all_devices(backend)
    tpu_worker.get_device_topology_order_id = lambda local, all_devices: host  # CPU devices have no coordinates
    if available_nbytes:
        from tpu_offload.worker import worker as library

        vars(library)["available_nbytes"] = lambda: available_nbytes
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    driver: Connection[Any, Any] = Connection(fd)
    worker = WorkerWrapperBase(rpc_rank=0)
    driver.send_bytes(b"")
    while True:
        try:
            method, args, kwargs = cloudpickle.loads(driver.recv_bytes())
            result = run_method(worker, method, args, kwargs)
            if hasattr(result, "get_output"):  # of a step with async scheduling
                result = result.get_output()
            driver.send_bytes(cloudpickle.dumps(result))
        except EOFError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)  # the other hosts wait in a collective


if __name__ == "__main__":
    main()
