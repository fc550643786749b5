import pytest

from tests.tpu_compile import recorded
from tests.tpu_compile.harness import Compiler


@pytest.fixture(scope="package")
def compiler(request):
    """Compiles what `recorded` does not know; with --record-figures everything, and it records that."""
    records = request.config.option.record_figures
    compiler = Compiler({} if records else recorded.load())
    yield compiler
    compiler.close()
    if records:
        recorded.save(compiler.figures)
