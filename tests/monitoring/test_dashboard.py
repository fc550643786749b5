"""The dashboard is well-formed, as far as that can be known without Grafana."""

import itertools
import json
import re

import pytest

from tests.monitoring.prometheus import missing
from tpu_offload import ConfigError
from tpu_offload.monitoring import ROWS, dashboard
from tpu_offload.monitoring.dashboard import SCHEMA_VERSION
from tpu_offload.monitoring.panels import Shape, Unit

DASHBOARD = dashboard.dashboard()
TOP = DASHBOARD["panels"]
PANELS = [inner for panel in TOP for inner in (panel, *panel.get("panels", ()))]
DRAWN = [panel for panel in PANELS if panel["type"] != "row"]


def cells(panel):
    grid = panel["gridPos"]
    return {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}


def overlaps(panels):
    return [(a["title"], b["title"]) for a, b in itertools.combinations(panels, 2) if cells(a) & cells(b)]


def test_ids_and_titles_are_unique():
    ids = [panel["id"] for panel in PANELS]
    assert sorted(ids) == list(range(1, len(PANELS) + 1))
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles) == sum(1 + len(row.panels) for row in ROWS)


def test_panels_are_within_the_grid_and_do_not_overlap():
    assert all(x < 24 for panel in PANELS for x, _ in cells(panel))
    assert overlaps(TOP) == []
    for panel in TOP:
        assert overlaps(panel.get("panels", ())) == []
        assert all(inner["gridPos"]["y"] > panel["gridPos"]["y"] for inner in panel.get("panels", ()))
    assert overlaps([TOP[1], TOP[1]]), "this test can fail"
    tops = [panel["gridPos"]["y"] for panel in TOP]
    assert tops == sorted(tops)


def test_every_query_is_for_the_chosen_data_source_and_engines():
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert DASHBOARD["schemaVersion"] == SCHEMA_VERSION
    assert DRAWN
    for panel in DRAWN:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            asked = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert asked == {"model", "instance"} <= set(variables)
            assert target["legendFormat"]
    for name in ("model", "instance"):
        assert variables[name]["allValue"] == ".*", "engines without the label, too"


def test_every_panel_says_what_it_shows():
    for panel in DRAWN:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in {unit.value for unit in Unit}
        assert panel["type"] in {shape.value for shape in Shape}


def test_a_title_that_is_there_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(dashboard, "ROWS", (*ROWS, ROWS[0]))
    with pytest.raises(ConfigError, match=r"titles in the dashboard twice: .*'Is something wrong\?'"):
        dashboard.dashboard()


def lost(before, after, path=""):
    """Paths of what differs between two JSON values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            yield from lost(before[key], after.get(key, "(nothing)"), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from lost(one, other, f"{path}[]")
    elif before != after:
        yield path


@pytest.fixture(scope="module")
def through_grafana_types():
    """Reads a dashboard into the types of Grafana's own SDK and writes it again: what they do not know is lost."""
    try:
        from grafana_foundation_sdk.cog import encoder, plugins
        from grafana_foundation_sdk.models import dashboard as models
    except ImportError:
        missing("needs the package grafana-foundation-sdk of the extra `test`")
    plugins.register_default_plugins()
    return lambda made: json.loads(json.dumps(models.Dashboard.from_json(made), cls=encoder.JSONEncoder))


def test_grafanas_types_have_every_field(through_grafana_types):
    # The two of the annotation are Prometheus' own, which the SDK's type of annotations leaves out.
    known = {".annotations.list[].titleFormat", ".annotations.list[].textFormat"}
    assert set(lost(DASHBOARD, through_grafana_types(DASHBOARD))) == known


def test_a_misspelt_field_is_found(through_grafana_types):
    wrong = json.loads(json.dumps(DASHBOARD))
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "Bps"
    wrong["panels"][1]["options"]["graphMod"] = "none"
    assert {".panels[].fieldConfig.defaults.units", ".panels[].options.graphMod"} <= set(
        lost(wrong, through_grafana_types(wrong))
    )
