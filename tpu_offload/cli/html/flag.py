"""The flag `--html`."""

from tpu_offload.cli.command import require
from tpu_offload.cli.files import output_file
from tpu_offload.cli.options import Decorator, option


def html_flag() -> Decorator:
    """The flag `--html`."""
    return option("--html", output_file, "FILE", "write a report with charts, one file for a browser, to FILE")


def check_html(path: object) -> None:
    """Refuses `--html` early where its packages are not installed.

    Args:
      path: the flag's value; None if it is not given.
    Raises:
      InputError: a package is missing.
    """
    if path is not None:
        require("--html", "plotly", "jinja2")
