"""Shared by the tests of the HTML reports."""

import pytest

from tests.cli.html import browser as browser_lib


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browser_lib.opened(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
