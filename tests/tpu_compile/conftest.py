import pytest

from tests.tpu_compile.harness import Compiler


@pytest.fixture(scope="package")
def compiler():
    compiler = Compiler()
    yield compiler
    compiler.close()
