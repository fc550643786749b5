from tpu_offload.core.policies import Use
from tpu_offload.core.request_state import RequestState
from tpu_offload.native import is_compiled
from tpu_offload.types import ChunkKey

# What a preempted request does not hand on: where it is saved, it begins with what is given, and it has no load. It is
# planned once, in the coming step, and matched, admitted and offered never.
OWN = {
    "arrival",
    "backoff_until_s",
    "block_table",
    "has_kv",
    "last_match",
    "load",
    "num_checkpoint_chunks",
    "num_deferred_chunks",
    "num_gone_chunks",
    "num_offered_chunks",
    "num_saved_chunks",
    "num_tried_chunks",
    "offered_in_step",
    "promise",
    "revoked",
    "rolling",
}


def test_what_is_saved_at_preemption_has_all_else_that_the_request_has():
    request = RequestState("r", account="r#0", use=Use(7), namespace=b"n")
    names = {name for name in dir(request) if not name.startswith("_") and not callable(getattr(request, name))}
    assert names > OWN
    for name in names:  # so that nothing is as in a new request
        value = getattr(request, name)
        if type(value) in (bool, int, float):
            setattr(request, name, not value if type(value) is bool else value + 3)
        elif not is_compiled():  # compiled attributes have types
            setattr(request, name, object())
    if is_compiled():
        request.keys = [ChunkKey(b"k")]
    saved = request.copy_for_early_save([1, 2], 2)
    assert {name: getattr(saved, name) for name in names - OWN} == {
        name: getattr(request, name) for name in names - OWN
    }
    assert (saved.block_table, saved.num_offered_chunks) == ([1, 2], 2)
    assert (saved.promise, saved.load, saved.revoked) == (None, None, None)
    assert saved.num_saved_chunks == saved.num_tried_chunks == saved.num_deferred_chunks == saved.num_gone_chunks == 0
