"""The whole suite runs on the CPU backend with eight virtual devices, but for `-m tpu`."""

import os


def pytest_configure(config):
    # Before the first test module imports jax, which reads both.
    if config.option.markexpr != "tpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
