import logging
import os

import pytest

from tpu_offload.memory import available_nbytes, cap_chunks, size_swap_pool

GB = 2**30


@pytest.fixture
def cgroups(tmp_path):
    """Writes fake cgroup files; returns a function that gives the available bytes under them."""

    def write(files, process_cgroups, ram_nbytes=100 * GB):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        listing = tmp_path / "self_cgroup"
        listing.write_text(process_cgroups)
        return available_nbytes(ram_nbytes=ram_nbytes, cgroup_root=tmp_path / "cgroup", process_cgroups=listing)

    return write


def test_without_cgroups_ram_counts(cgroups):
    assert cgroups({}, "") == 100 * GB


def test_v2_limit(cgroups):
    assert cgroups({"a/memory.max": 8 * GB, "a/memory.current": 3 * GB}, "0::/a\n") == 5 * GB


def test_v2_page_cache_counts_as_available(cgroups):
    stat = f"anon {GB}\ninactive_file {2 * GB}\nactive_file {GB}"
    files = {"a/memory.max": 8 * GB, "a/memory.current": 4 * GB, "a/memory.stat": stat}
    assert cgroups(files, "0::/a\n") == 6 * GB


def test_v2_a_parent_may_leave_less(cgroups):
    files = {
        "a/memory.max": 10 * GB, "a/memory.current": 9 * GB,
        "a/b/memory.max": 8 * GB, "a/b/memory.current": GB,
    }  # fmt: skip
    assert cgroups(files, "0::/a/b\n") == GB


def test_v2_no_limit(cgroups):
    assert cgroups({"a/memory.max": "max", "a/memory.current": GB}, "0::/a\n") == 100 * GB


def test_v2_container_sees_its_limit_at_the_root(cgroups):
    files = {"memory.max": 4 * GB, "memory.current": GB}
    assert cgroups(files, "0::/../../host/path/that/is/not/here\n") == 3 * GB


def test_v1_limit(cgroups):
    files = {"memory/a/memory.limit_in_bytes": 6 * GB, "memory/a/memory.usage_in_bytes": 5 * GB}
    stat = {"memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}"}
    assert cgroups(files | stat, "4:cpu,memory:/a\n1:name=systemd:/x\n") == 2 * GB


def test_v1_says_no_limit_with_a_huge_number(cgroups):
    files = {"memory/a/memory.limit_in_bytes": 9223372036854771712, "memory/a/memory.usage_in_bytes": GB}
    assert cgroups(files, "4:memory:/a\n") == 100 * GB


def test_hybrid_hosts_count_both(cgroups):
    files = {
        "memory/a/memory.limit_in_bytes": 6 * GB, "memory/a/memory.usage_in_bytes": GB,
        "unified/b/memory.max": 3 * GB, "unified/b/memory.current": GB,
    }  # fmt: skip
    assert cgroups(files, "4:memory:/a\n0::/b\n") == 2 * GB


def test_ram_may_be_less_than_the_cgroup_leaves(cgroups):
    assert cgroups({"a/memory.max": 8 * GB, "a/memory.current": 0}, "0::/a\n", ram_nbytes=GB) == GB


def test_never_negative(cgroups):
    assert cgroups({"a/memory.max": GB, "a/memory.current": 2 * GB}, "0::/a\n") == 0


def test_malformed_files_are_no_limit(cgroups):
    assert cgroups({"a/memory.max": "soon", "a/memory.current": ""}, "0::/a\nnonsense\n") == 100 * GB


@pytest.mark.parametrize("name", [b"\xff", "Größe".encode(), b"a:b"])
def test_any_name_of_a_cgroup(tmp_path, name):
    """Names are bytes, in any locale."""
    listing, cgroup = tmp_path / "listing", tmp_path / "cgroup" / os.fsdecode(name)
    cgroup.mkdir(parents=True)
    for file, text in {"memory.max": f"{4 * GB}", "memory.current": f"{GB}", "memory.stat": ""}.items():
        (cgroup / file).write_text(text)
    listing.write_bytes(b"0::/" + name + b"\n")
    assert available_nbytes(ram_nbytes=100 * GB, cgroup_root=tmp_path / "cgroup", process_cgroups=listing) == 3 * GB


def test_this_machine_has_some():
    assert 0 < available_nbytes() < 2**50


def test_cap_that_fits_logs_nothing(caplog):
    assert cap_chunks(80, chunk_nbytes=GB, fraction=0.8, available=100 * GB) == 80
    assert not caplog.records


def test_cap_clamps_and_warns_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert cap_chunks(81, chunk_nbytes=GB, fraction=0.8, available=100 * GB) == 80
    (record,) = caplog.records
    for part in ("from 81 to 80 chunks", "81.00 to 80.00 GB", "0.8", "100.00 GB"):
        assert part in record.getMessage()


def test_cap_to_nothing(caplog):
    assert cap_chunks(5, chunk_nbytes=GB, fraction=0.5, available=GB) == 0
    assert "nothing is offloaded" in caplog.text


def pool(wanted, *, groups=((100, 1000),), fraction=0.8, available=10**9):
    return size_swap_pool(wanted, groups=groups, fraction=fraction, available=available)


def test_a_swap_pool_has_as_many_blocks_as_fit_its_size(caplog):
    assert pool(5000) == (5,)  # an exact fit fits
    assert pool(5999) == (5,)
    assert pool(500_000) == (500,)  # it may be larger than HBM
    assert not caplog.records


def test_auto_is_twice_the_kv_cache():
    assert pool(None, groups=((100, 1000), (7, 300))) == (200, 14)


def test_layer_groups_get_the_same_share_of_their_blocks():
    assert pool(51_500, groups=((100, 1000), (10, 300))) == (50, 5)


def test_a_swap_pool_is_clamped_to_the_safe_share_with_one_warning(caplog):
    assert pool(50_000, fraction=0.5, available=40_000) == (20,)
    assert len(caplog.records) == 1
    assert "TPU_OFFLOAD_SWAP_SAFETY=0.5" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "groups", "available"),
    [
        (999, ((100, 1000),), 10**9),
        (50_000, ((100, 1000),), 0),
        (5000, ((100, 1000), (10, 300)), 10**9),  # five blocks of the one and half a block of the other
    ],
)
def test_less_than_a_block_of_each_group_is_no_pool(wanted, groups, available, caplog):
    assert pool(wanted, groups=groups, available=available) == (0,) * len(groups)
    assert "preempted requests are recomputed" in caplog.records[-1].message
