"""The store of an `object` tier: a bucket, a directory or memory, from its URL."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import GCSStore, LocalStore, MemoryStore, S3Store

from tpu_offload.errors import ConfigError
from tpu_offload.storage.object_directory import make_directory
from tpu_offload.storage.object_errors import reason
from tpu_offload.storage.url_options import SETTING, UrlOptions
from tpu_offload.values import one_line

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

type Store = S3Store | GCSStore | LocalStore | MemoryStore

_EXAMPLE = "gs://bucket/prefix"


def open_store(text: str, *, create: bool = True) -> tuple[Store, Path | None]:
    """The store of a URL, and its directory if it is one.

    Args:
      text: `TPU_OFFLOAD_STORAGE_OPTIONS`.
      create: a directory is created if it is missing; else it is an error.
    Raises:
      ConfigError: it is no such URL, is the directory of a file tier, or the store cannot be opened.
    """
    options = UrlOptions(text, schemes={"gs": 0, "s3": 0, "file": 0, "memory": 0}, example=_EXAMPLE)
    if options.scheme in ("file", "memory"):
        options.end()
        if options.scheme == "memory":
            return MemoryStore(), None
        return _open_directory(options, create=create)
    if not options.place:
        raise ConfigError(f"{SETTING}={one_line(text)} has no bucket; expected such as {_EXAMPLE}")
    timeout_s = options.number("timeout_s", 10.0, least=0.05, most=3600)
    client: ClientConfig = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=options.number("connect_timeout_s", 2.0, least=0.05, most=3600)),
        "allow_http": options.boolean("allow_http", False),
    }
    # None is retried after `timeout_s`: a call takes at most twice as long.
    retry: RetryConfig = {
        "max_retries": int(options.number("retries", 2, least=0, most=100)),
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
    }
    certificate = options.file("ca_file")
    if certificate is not None:
        client["root_certificate"] = certificate
    make = _s3 if options.scheme == "s3" else _gcs
    config = make(options)
    options.end()
    url = f"{options.scheme}://{options.place}/{options.path.strip('/')}"
    store = S3Store if options.scheme == "s3" else GCSStore
    try:
        return store.from_url(url, config=config, client_options=client, retry_config=retry), None  # type: ignore[arg-type]
    except (BaseError, OSError, ValueError) as e:
        raise ConfigError(f"{SETTING}: {url} cannot be opened: {reason(e)}") from None


def _s3(options: UrlOptions) -> Mapping[str, Any]:
    config: dict[str, Any] = {
        # Hashing the payload takes a core for 1.5 GB/s; the record has its own checksum.
        "unsigned_payload": options.boolean("unsigned_payload", True),
        "virtual_hosted_style_request": options.boolean("virtual_hosted_style", False),
    }
    if options.boolean("anonymous", False):
        config["skip_signature"] = True
    given = {"endpoint": options.url("endpoint"), "region": options.text("region")}
    config |= {name: value for name, value in given.items() if value}
    return config


def _gcs(options: UrlOptions) -> Mapping[str, Any]:
    # obstore asks for a token before a PUT even with `skip_signature` (arrow-rs-object-store issue 520).
    if options.boolean("anonymous", False):
        raise options.error(
            "anonymous",
            "true",
            "false with gs://: writes need credentials, from GOOGLE_SERVICE_ACCOUNT or a metadata server",
        )
    endpoint = options.url("endpoint")
    return {"base_url": endpoint} if endpoint else {}


def _open_directory(options: UrlOptions, *, create: bool) -> tuple[Store, Path]:
    path = Path(options.path)
    if options.place or not path.is_absolute() or path == Path("/"):
        raise ConfigError(
            f"{SETTING}=file://{options.place}{one_line(options.path)[1:-1]}; expected an absolute path, file:///mnt/cache"
        )
    try:
        if any(path.glob("worker-*/directory.bin")):  # tools could not tell what is whose
            raise ConfigError(
                f"{path} is the directory of a file tier: give it without file:// to a file tier, or give another one"
            )
        if create:
            make_directory(path)
        return LocalStore(path), path
    except ConfigError:
        raise
    except (BaseError, OSError, ValueError) as e:
        raise ConfigError(f"{SETTING}=file://{one_line(options.path)[1:-1]} cannot be opened: {reason(e)}") from None


def where(store: Store) -> str:
    """The URL of the store, without options, for messages."""
    if isinstance(store, MemoryStore):
        return "memory://"
    place = "" if isinstance(store, LocalStore) else f"{store.config['bucket']}/"
    scheme = {LocalStore: "file", S3Store: "s3"}.get(type(store), "gs")
    return one_line(f"{scheme}://{place}{store.prefix or ''}")[1:-1]
