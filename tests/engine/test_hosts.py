"""The engine on several hosts: processes that each have a part of the caches and a worker."""

import contextlib
import dataclasses
import os
import signal

import pytest

from tests.engine.helpers import SMALL_ENGINE, STATEFUL, make_request, num_loaded, random_tokens, rounds, serve_rounds
from tpu_offload import ConfigError, OffloadConfig
from tpu_offload.engine import Engine, HostError, Hosts
from tpu_offload.engine.shards import check_shards

# Full attention, a window and states, for two devices.
MODEL = dataclasses.replace(STATEFUL, num_layers=3, window_layers=(1,), state_layers=(0,))
ENGINE = dataclasses.replace(SMALL_ENGINE, num_blocks=64, num_states=8)
OFFLOAD = OffloadConfig.create(num_cpu_chunks=200, state_share=0.5, breaker_failures=0)
REQUESTS = rounds(num_rounds=3, num_prompts=3)


class LosesCaches:
    """Wraps a copier: its third load destroys the KV caches."""

    num_loads = 0

    def __init__(self, copier, store):
        self._copier = copier

    def __getattr__(self, name):
        return getattr(self._copier, name)

    def load(self, segment_id, moves, kv_caches):
        LosesCaches.num_loads += 1
        if LosesCaches.num_loads == 3:
            for cache in kv_caches:
                cache.delete()
            raise RuntimeError("injected")
        return self._copier.load(segment_id, moves, kv_caches)


class FailsSaves:
    """Wraps a copier: every twelfth dispatch of a save fails; a job has several."""

    num_saves = 0

    def __init__(self, copier, store):
        self._copier = copier

    def __getattr__(self, name):
        return getattr(self._copier, name)

    def save(self, segment_id, moves, kv_caches):
        FailsSaves.num_saves += 1
        if FailsSaves.num_saves % 12 == 0:
            raise RuntimeError("injected")
        return self._copier.save(segment_id, moves, kv_caches)


def serve(hosts, offload):
    with contextlib.closing(Engine(MODEL, ENGINE, offload=offload, hosts=hosts)) as engine:
        engine.wait_for_host_memory()
        outputs = serve_rounds(engine, REQUESTS)
        return outputs, engine.offload_stats(), engine.stats()


def step_to_the_end(engine):
    while engine.has_unfinished:
        engine.step()


@pytest.fixture(scope="module")
def expected():
    """Tokens and log-probabilities of one process without offloading."""
    return compared(serve_rounds(Engine(MODEL, ENGINE), REQUESTS))


def compared(outputs):
    return {name: (output.tokens, output.logprobs) for name, output in outputs.items()}


def test_tokens_equal_those_of_one_process(expected, programs_of_hosts):
    """And a host that dies ends the engine with one line, while another waits for it in a collective."""
    with Hosts(2, 1) as hosts:
        plain, _, _ = serve(hosts, None)
        assert compared(plain) == expected
        outputs, stats, _ = serve(hosts, OFFLOAD)
        assert compared(outputs) == expected
        assert num_loaded(outputs) > 50
        assert stats.saved_blocks > 0 < stats.loaded_blocks
        assert stats.num_failed_jobs == 0
        programs_of_hosts.exchange()

        engine = Engine(MODEL, ENGINE, offload=OFFLOAD, hosts=hosts)
        engine.add_request(make_request("r", random_tokens(0, 40), max_tokens=80))
        for _ in range(3):
            engine.step()
        pids = hosts.process_ids
        os.kill(pids[1], signal.SIGKILL)
        # The other host waits for it in a collective.
        with pytest.raises(HostError, match=r"^host 1 of 2 has died \(SIGKILL\): the engine cannot continue"):
            step_to_the_end(engine)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.wide
def test_storage_of_both_hosts_survives_a_restart(expected, tmp_path):
    """Chunks, windows and states; each host in files of its own. Damage of one host's is computed."""
    offload = OffloadConfig.create(
        num_cpu_chunks=60,
        state_share=0.5,
        storage_tier="file",
        storage_options=f"{tmp_path / 'kv'},min_free_gb=0",
        num_storage_chunks=600,
        storage_wait_s=600.0,
        load_mode="load",  # else the machine's speed decides
    )
    cold = dataclasses.replace(ENGINE, enable_prefix_caching=False)

    def serve_from_files(hosts):
        with contextlib.closing(Engine(MODEL, cold, offload=offload, hosts=hosts)) as engine:
            engine.wait_for_host_memory()
            outputs = serve_rounds(engine, REQUESTS)
            assert compared(outputs) == expected
            engine.settle()
            return num_loaded(outputs), engine.offload_stats()

    with Hosts(2, 1) as hosts:
        first, stats = serve_from_files(hosts)
        assert stats.cascaded_chunks > 25
        assert stats.num_failed_jobs == 0
        again, stats = serve_from_files(hosts)
        assert stats.restored_chunks > 25
        assert stats.promoted_chunks > 10
        assert again > first
        damage(tmp_path / "kv" / "worker-1")
        _, stats = serve_from_files(hosts)
        assert stats.failed_storage_chunks > 0
        assert stats.promoted_chunks > 0


def damage(directory):
    """Changes a byte of every seventh page: of some records the header, of some the payload."""
    (segment,) = directory.glob("segment-*")
    with segment.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(100, size, 7 * 4096):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.wide
def test_failures_on_one_host_change_no_token(expected):
    """Host 0 loses its caches in a load, and some saves of host 1 fail."""
    with Hosts(2, 1, wrap_copiers={0: LosesCaches, 1: FailsSaves}) as hosts:
        outputs, stats, engine_stats = serve(hosts, OFFLOAD)
        assert compared(outputs) == expected
        assert engine_stats.num_cache_losses == 1
        assert stats.num_failed_jobs > 2
        assert stats.loaded_blocks > 0

        fused = OffloadConfig.create(num_cpu_chunks=8, save_path="fused")
        with pytest.raises(HostError, match=r"^host \d of 2 has failed \(ConfigError: .*TPU_OFFLOAD_SAVE_PATH"):
            Engine(MODEL, ENGINE, offload=fused, hosts=hosts)
    with pytest.raises(HostError, match=r"^the hosts are closed; expected no call after close\(\)$"):
        hosts.ask("start")


def test_heads_that_cannot_be_divided():
    check_shards(MODEL, 2)
    with pytest.raises(ConfigError, match="num_kv_heads=2 of bfloat16 cannot be divided among 4 devices; expected a"):
        check_shards(MODEL, 4)
    with pytest.raises(ConfigError, match="num_state_heads=2 cannot be divided among 4 devices"):
        check_shards(dataclasses.replace(MODEL, num_kv_heads=4), 4)
