from tpu_offload.core.policies import Use
from tpu_offload.core.request_state import RequestState
from tpu_offload.native import is_compiled
from tpu_offload.types import ChunkKey


def test_a_copy_has_all_that_the_request_has():
    request = RequestState("r", account="r#0", use=Use(7), namespace=b"n")
    names = [name for name in dir(request) if not name.startswith("_") and not callable(getattr(request, name))]
    assert len(names) > 30
    for name in names:  # so that nothing is as in a new request
        value = getattr(request, name)
        if type(value) in (bool, int, float):
            setattr(request, name, not value if type(value) is bool else value + 3)
        elif not is_compiled():  # compiled attributes have types
            setattr(request, name, object())
    if is_compiled():
        request.keys, request.block_tables = [ChunkKey(b"k")], [[1, 2]]
    copied = request.copy()
    assert copied is not request
    assert {name: getattr(copied, name) for name in names} == {name: getattr(request, name) for name in names}
