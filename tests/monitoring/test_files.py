"""The committed files are the generated ones."""

import re

import pytest

from tests.monitoring.prometheus import ROOT
from tpu_offload.metrics import HISTOGRAMS, METRICS, TIER_METRICS
from tpu_offload.monitoring.expressions import VLLM_SERIES
from tpu_offload.monitoring.files import METRICS_PAGE, generated_files, write_files

GENERATED = generated_files()


@pytest.mark.parametrize("path", GENERATED)
def test_a_committed_file_is_the_generated_one(path):
    assert (ROOT / path).read_text() == GENERATED[path], f"run scripts/monitoring, which writes {path}"


def test_nothing_else_claims_to_be_generated(tmp_path):
    write_files(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(GENERATED)
    assert all((tmp_path / path).read_text() == text for path, text in GENERATED.items())


def test_the_page_has_every_series_once():
    rows = re.findall(r"^\| `vllm:(\w+)` \|", GENERATED[METRICS_PAGE], re.MULTILINE)
    own = [spec.series for specs in (METRICS, TIER_METRICS) for spec in specs.values()]
    own += [spec.family for spec in HISTOGRAMS.values()]
    expected = [f"tpu_offload_{name}" for name in own] + [name.removeprefix("vllm:") for name in VLLM_SERIES.values()]
    assert sorted(rows) == sorted(expected)


def test_the_page_says_where_a_series_is_used():
    row = next(line for line in GENERATED[METRICS_PAGE].splitlines() if "`vllm:tpu_offload_saved_blocks_total`" in line)
    assert row == (
        "| `vllm:tpu_offload_saved_blocks_total` | counter | blocks |  | Blocks of finished saves. | *Blocks copied*, "
        "[TpuOffloadSavesDropped](monitoring.md#tpuoffloadsavesdropped), "
        "[TpuOffloadSilent](monitoring.md#tpuoffloadsilent) |"
    )
    assert not re.search(r"\|  \|$", GENERATED[METRICS_PAGE], re.MULTILINE), "every series is used somewhere"
