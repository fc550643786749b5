from tests.core.fakes import FakeWorker
from tests.core.window_engine import WindowEngine
from tests.inside.scheduler import request_table


def test_a_request_is_looked_up_by_its_id_as_in_a_dict() -> None:
    table = request_table(WindowEngine((), num_rows=60, workers=[FakeWorker(num_host_chunks=8)]).scheduler)
    for request_id in "b", "a":
        table.add(table.new(request_id))
    assert table["a"].request_id == "a"
    assert table.get("c") is None
    assert [request.request_id for request in table.all()] == ["b", "a"]
    table.remove("a")
    assert table.get("a") is None
    assert len(table) == 1
