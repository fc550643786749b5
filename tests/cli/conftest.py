"""What tests of the commands share."""

import pytest

import tpu_offload.cli.transfer_rates as transfer_rates

TINY_BENCH = (
    *("--num-layers", "2", "--page-shape", "4", "8", "2", "8", "--devices", "1"),
    *("--num-blocks", "1", "3", "--rounds", "2"),
)


@pytest.fixture
def small_buffers(monkeypatch):
    """Lets caches, host pools and the limit's buffers be as small as the jobs."""
    monkeypatch.setattr(transfer_rates, "_WALK_NBYTES", 1)
