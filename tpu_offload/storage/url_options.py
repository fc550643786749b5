"""`TPU_OFFLOAD_STORAGE_OPTIONS` as a URL with options: `scheme://place?name=value&name=value`."""

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import final
from urllib.parse import parse_qsl, unquote, urlsplit

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError
from tpu_offload.values import one_line

SETTING = f"{ENV_PREFIX}STORAGE_OPTIONS"

_HOST = r"(?:\[[^]]*\]|[^:\[\]]*)(?::\d*)?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@final
class UrlOptions:
    """A parsed URL. Each option is taken once, by its type; `end` refuses the rest.

    Credentials are refused: the options are logged.

    Args:
      text: the setting.
      schemes: those that the tier serves.
      example: for the message of an error.
    Attributes:
      scheme: one of `schemes`.
      place: between `//` and the path: hosts, or a bucket.
      path: from the first `/` on, unquoted.
    Raises:
      ConfigError: it is not such a URL.
    """

    def __init__(self, text: str, *, schemes: Mapping[str, object], example: str) -> None:
        if _has_credentials(text):  # and no message must show it
            raise ConfigError(f"{SETTING} has a user or password before the host; take it out: the setting is logged")
        expected = f"expected {', '.join(f'{scheme}://' for scheme in schemes)}, such as {example}"
        try:
            parts = urlsplit(text)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        except ValueError as e:
            why = re.split("[:']", str(e))[0].strip()  # what follows may be a secret
            raise ConfigError(f"{SETTING} is not a URL with options ({why}); {expected}") from None
        if parts.scheme not in schemes or parts.fragment:
            raise ConfigError(f"{SETTING}={one_line(text)}; {expected}")
        self.scheme = parts.scheme
        self.place = parts.netloc
        self.path = unquote(parts.path)
        self._given = dict(pairs)
        self._known: list[str] = []
        if len(self._given) < len(pairs):
            raise ConfigError(f"{SETTING}: an option is given twice: {', '.join(name for name, _ in pairs)}")

    def text(self, name: str) -> str:
        """A string; empty if it is not given."""
        self._known.append(name)
        return self._given.pop(name, "")

    def url(self, name: str) -> str:
        """A URL without a user or password; empty if it is not given."""
        value = self.text(name)
        if _has_credentials(value):
            raise ConfigError(f"{SETTING}: {name} has a user or password; take it out: the setting is logged")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """`true` or `false`."""
        value = self.text(name)
        if value and value.lower() not in _BOOLEANS:
            raise self.error(name, value, "true or false")
        return _BOOLEANS[value.lower()] if value else default

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """A finite number."""
        value = self.text(name)
        try:
            number = float(value) if value else default
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise self.error(name, value, f"a number from {least:g} to {most:g}")
        return number

    def file(self, name: str) -> bytes | None:
        """The content of a file; None if it is not given."""
        value = self.text(name)
        try:
            return Path(value).read_bytes() if value else None
        except (OSError, ValueError) as e:
            raise self.error(name, value, f"a file that can be read ({one_line(e)})") from None

    def end(self) -> None:
        """Refuses options that were not read."""
        for name in self._given:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            # Without its value, which may be a secret.
            known = f"It has: {', '.join(self._known)}" if self._known else "It has none."
            raise ConfigError(f"{SETTING}: {self.scheme}:// has no option {one_line(name)}{hint} {known}")

    def error(self, name: str, value: str, expected: str) -> ConfigError:
        """The error of an option's value."""
        return ConfigError(f"{SETTING}: {name}={one_line(value)}; expected {expected}")


def _has_credentials(url: str) -> bool:
    """Whether there is a user or password before the host, also one with a slash, `?` or `#`, which end the host."""
    authority = re.split(r"[/?#]", url.partition("://")[2])[0]
    return "@" in authority or ("@" in url and not _HOSTS.fullmatch(authority))
