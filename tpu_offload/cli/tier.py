"""`tpu-offload tier`: looks at what storage tiers hold, of any model, without an engine; and deletes it."""

import functools
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from tpu_offload.cli.command import require
from tpu_offload.cli.files import output_file, write_json
from tpu_offload.cli.interrupts import stop_on_interrupt
from tpu_offload.cli.options import Decorator, number, option
from tpu_offload.errors import ConfigError, InputError, OffloadError
from tpu_offload.storage import (
    STORAGE_TIERS,
    StoredRecord,
    StoreInspector,
    Survey,
    Verification,
    open_inspector,
    sample,
    tier_of,
)
from tpu_offload.values import error_text

_STORE = """STORE is the directory of a file tier, or the URL of an object or valkey tier, as in
TPU_OFFLOAD_STORAGE_OPTIONS; with --tier, the options of that tier."""
_json = option("--json", output_file, "FILE", "write the results to FILE")
_tier = option("--tier", str, "NAME", "a tier's name, or module:Class of one of your own (default: as STORE looks)")
_sample = number("--sample", "check only N records, chosen at random", high=1_000_000)


class _Store(NamedTuple):
    options: str
    tier: str


@click.group(no_args_is_help=False)
def command() -> None:
    """Lists, verifies or clears what storage tiers hold, of any model, without an engine. See docs/tiers.md."""


def _subcommand(name: str, help_: str) -> Decorator:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def run(argv: list[str], store: str, *, tier: str | None, **options: Any) -> int:
            return int(function(argv, _Store(store, tier or tier_of(store)), **options))

        with_store = click.argument("store", metavar="STORE")(_tier(click.pass_obj(run)))
        return command.command(name, help=f"{help_}\n\n{_STORE}", short_help=help_)(with_store)

    return decorate


@contextmanager
def _opened(store: _Store) -> Iterator[StoreInspector]:
    if (registered := STORAGE_TIERS.get(store.tier)) and registered.package:
        require(f"a store of a tier {store.tier}", registered.package)
    try:
        with closing(open_inspector(store.options, store.tier)) as inspector:
            yield inspector
    except ConfigError as e:  # it names the setting, whose syntax this is
        raise InputError(
            str(e)
            .replace("TPU_OFFLOAD_STORAGE_OPTIONS=", "STORE ")
            .replace("TPU_OFFLOAD_STORAGE_OPTIONS", "STORE")
            .replace("TPU_OFFLOAD_STORAGE_TIER=", "--tier ")
        ) from e
    except (OffloadError, OSError, click.ClickException):
        raise
    except Exception as e:
        if registered:
            raise
        raise InputError(f"--tier {store.tier}: {error_text(e)}") from e  # the user's own class


@_subcommand("ls", "List models, workers and generations, with their chunks, bytes and ages.")
@click.option("--keys", is_flag=True, help="also print the key of each chunk, in hexadecimal")
@_json
def _ls(argv: list[str], store: _Store, *, keys: bool, json: Path | None) -> int:
    from tpu_offload.cli import tier_report

    survey = Survey()
    with _opened(store) as inspector:
        for record in survey.records(inspector.scan()):
            if keys:
                sys.stdout.write(tier_report.line_of(record))
        report = {"store": inspector.where, **tier_report.as_json(survey), "argv": argv}
    _write(json, report)
    tier_report.print_holdings(report)
    return 0


@_subcommand("stats", "Say how full a store is, who uses it, and whether headers of records are damaged.")
@_sample
@_json
def _stats(argv: list[str], store: _Store, *, sample: int | None, json: Path | None) -> int:
    return _check(argv, store, headers_only=True, sample_size=sample, json=json)


@_subcommand("verify", "Read every record and check all of its bytes; exit with 1 if damage is found.")
@_sample
@_json
def _verify(argv: list[str], store: _Store, *, sample: int | None, json: Path | None) -> int:
    return _check(argv, store, headers_only=False, sample_size=sample, json=json)


def _check(argv: list[str], store: _Store, *, headers_only: bool, sample_size: int | None, json: Path | None) -> int:
    from tpu_offload.cli import tier_report
    from tpu_offload.cli.tables import progress

    name, survey = "stats" if headers_only else "verify", Survey()
    with _opened(store) as inspector, stop_on_interrupt() as stops:
        facts = inspector.facts()
        records: Iterator[StoredRecord] = itertools.takewhile(
            lambda record: not stops(), survey.records(inspector.scan())
        )
        num_records = inspector.num_records
        if sample_size is not None:
            chosen = sample(records, sample_size, random.Random())
            records, num_records = iter(chosen), len(chosen)
        verification = Verification(inspector, headers_only=headers_only)
        with progress(num_records, what="records") as start:
            verification.run(records, on_record=start(name), stops=stops)
        report = {
            "store": inspector.where,
            **tier_report.as_json(survey),
            facts[0]: list(facts[1]),
            **tier_report.checks_as_json(verification),
            "interrupted": stops(),
            "argv": argv,
        }
    _write(json, report)
    if headers_only:
        tier_report.print_holdings(report)
        tier_report.print_facts(report[facts[0]])
    else:
        tier_report.print_damages(report)
    tier_report.print_checks(report)
    if stops():
        sys.stderr.write("interrupted: the results cover what was read until then\n")
    if not headers_only and (report["num_damaged"] or report["damages"]):
        return 1
    return 130 if stops() else 0


@_subcommand("clear", "Delete everything that any model has stored, so that no engine ever finds it again.")
@click.option("--yes", is_flag=True, help="do not ask")
@_json
def _clear(argv: list[str], store: _Store, *, yes: bool, json: Path | None) -> int:
    from tpu_offload.cli import tier_report
    from tpu_offload.cli.tables import progress

    num_deleted = 0
    with _opened(store) as inspector:
        inspector.check_unused()
        survey = Survey()
        survey.count(inspector.scan())
        report = {"store": inspector.where, **tier_report.as_json(survey)}
        tier_report.print_holdings(report)
        if not yes and not _confirms(inspector, survey):
            sys.stdout.write("Nothing was deleted.\n")
            return 1
        with progress(survey.num_records, what="records") as start:
            on_finish = start("clear")

            def on_deleted(num: int) -> None:
                nonlocal num_deleted
                num_deleted += num
                for _ in range(num):
                    on_finish()

            inspector.clear(on_deleted)
    _write(json, {**report, "num_deleted_chunks": num_deleted, "argv": argv})
    sys.stdout.write(f"Deleted {num_deleted:,} chunks. What was stored is never found again.\n")
    return 0


def _confirms(inspector: StoreInspector, survey: Survey) -> bool:
    whom = "All engines that use this server lose it." if inspector.is_shared else "An engine that uses it loses it."
    num_models = len({generation.fingerprint for generation in survey.holdings})
    sys.stdout.write(
        f"Delete {survey.num_records:,} chunks ({survey.nbytes / 2**30:,.2f} GB) of "
        f"{num_models} model{'s' * (num_models != 1)} in {inspector.where}? {whom} [y/N] "
    )
    sys.stdout.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise InputError("clear asks before it deletes, and there is no input; give --yes")
    return answer.strip().lower() in ("y", "yes")


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, report)
