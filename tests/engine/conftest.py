import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_fast(request):
    """LLVM optimizes nothing, which halves the time of a compile, of which most time of these tests is made.

    In modules that are marked `optimized` it does: those that hold bits of one program against those of another.
    """
    if request.node.get_closest_marker("optimized"):
        yield
        return
    jax.clear_caches()  # the option is no part of the key under which jax keeps programs in memory
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
