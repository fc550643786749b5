"""A real browser without a window, for the tests of the HTML reports: Chromium and its driver."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.monitoring.prometheus import missing

_UNPACKED = Path(sys.prefix, "chromium")  # scripts/_debian.sh


@final
class Browser:
    """An open browser; `open` loads a page and waits until its scripts have run."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1200) -> None:
        """Loads a file; an AssertionError if the page says something on the console."""
        self.driver.set_window_size(width, 900)
        self.driver.get(path.as_uri())
        said = self.driver.get_log("browser")
        assert said == [], said

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self.driver.execute_script(script)

    def charts(self) -> dict[str, Any]:
        """By title, the names and values that each chart was drawn with: `{name: (x, y)}`."""
        found = self.run(
            """
            return [...document.querySelectorAll("figure")].map(figure => [
              figure.querySelector("figcaption").textContent,
              figure.querySelector(".chart").data.map(one => [one.name, one.x, one.y]),
            ])
            """
        )
        return {title: {name: (x, y) for name, x, y in data} for title, data in found}


def _binaries() -> tuple[str, str, dict[str, str]]:
    """Chromium, its driver, and the variables that they need."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium and driver:
        return chromium, driver, {}
    if not (_UNPACKED / "usr/bin/chromedriver").is_file():
        missing("needs Chromium: `scripts/test tests/cli` fetches it, or install chromium and chromium-driver")
    libraries = {path.parent for path in (_UNPACKED / "usr/lib").rglob("*.so*")}
    variables = {"LD_LIBRARY_PATH": ":".join(sorted(map(str, libraries)))}
    if not Path("/etc/fonts/fonts.conf").is_file():
        variables["FONTCONFIG_FILE"] = str(_UNPACKED / "etc/fonts/fonts.conf")
    return str(_UNPACKED / "usr/lib/chromium/chromium"), str(_UNPACKED / "usr/bin/chromedriver"), variables


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """Starts a browser that reaches no network; `folder` is for its profile."""
    chromium, driver_path, variables = _binaries()
    options = ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",  # a container's root may not have one
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(argument)
    service = Service(driver_path, env=dict(os.environ) | variables)
    driver = Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
