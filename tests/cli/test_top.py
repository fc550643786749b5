"""`tpu-offload top` end to end, against real series on a loopback endpoint: what it shows, and endpoints that fail."""

import contextlib
import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tpu_offload import OffloadStats, StatsCollector
from tpu_offload.cli.main import main
from tpu_offload.errors import InputError
from tpu_offload.metrics import TierStats
from tpu_offload.monitoring.scrape import Scrape

MIB = 2**20


class Endpoint:
    """Serves texts in turn, the last one for ever; None closes the connection."""

    def __init__(self):
        self.texts: list[str | None] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.paths.append(self.path)
                text = outer.texts[0] if len(outer.texts) == 1 else outer.texts.pop(0)
                if text is None:
                    self.send_error(503)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def endpoint():
    served = Endpoint()
    yield served
    served.close()


def text_of(*, as_vllm=False, **counts):
    """What an engine with these counts exports; as vLLM does, with its prefix, and with its own counters."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: OffloadStats(**counts)))
    text = generate_latest(registry).decode()
    if as_vllm:
        text = text.replace("tpu_offload_", "vllm:tpu_offload_")
        text += '# TYPE vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{engine="0"} 400\n'
        text += '# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{engine="0"} 100\n'
    return text


def shown(capsys, *argv, status=0):
    capsys.readouterr()
    assert main(["top", *argv]) == status
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in capsys.readouterr().out.splitlines()
        if len(cells := line.strip("│┃ ").replace("┃", "│").split("│")) == 3
    }


def test_the_last_line_ends_where_it_is_no_terminal(endpoint, capsys):
    endpoint.texts = [text_of(as_vllm=True, looked_up_tokens=1000)]
    assert main(["top", endpoint.address, "--count", "1"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_one_reading_has_totals(endpoint, capsys):
    endpoint.texts = [
        text_of(
            as_vllm=True,
            looked_up_tokens=1000, found_tokens=250, loaded_tokens=240, saved_nbytes=3 * MIB, num_resident_chunks=7,
            num_host_chunks=10, staging_reserved_blocks=1, staging_peak_blocks=4, staging_budget_blocks=8,
        )
    ]  # fmt: skip
    rows = shown(capsys, endpoint.address, "--count", "1")
    assert endpoint.paths == ["/metrics"]
    assert rows["hit rate of HBM's prefix cache"] == ["-", "25.0%"]
    assert rows["hit rate of the host tier, behind it"] == ["-", "25.0%"]
    assert rows["tokens loaded a second"] == ["-", "240"]
    assert rows["saved, MiB/s"] == ["-", "3 MiB"]
    assert rows["chunks in the host tier"] == ["", "7 of 10"]
    assert rows["staging blocks in use (peak)"] == ["", "1 (4) of 8"]
    assert rows["failures, losses and drops"] == ["", "none"]
    assert "KINDS OF COPIES SUSPENDED" not in rows
    assert "states in the host tier" not in rows


def test_two_readings_have_rates_and_what_is_new(endpoint, capsys):
    before = {"looked_up_tokens": 1000, "found_tokens": 100, "num_failed_jobs": 2}
    after = {"looked_up_tokens": 1100, "found_tokens": 180, "num_failed_jobs": 5, "num_open_breakers": 1}
    endpoint.texts = [text_of(**before), text_of(**after, num_host_states=4, num_states=3)]
    rows = shown(capsys, f"http://{endpoint.address}/metrics", "--count", "2", "--interval", "0.1")
    assert rows["hit rate of the host tier, behind it"] == ["80.0%", f"{180 / 1100:.1%}"]
    assert rows["failed copies"] == ["", "5 (+3 since this began)"]
    assert rows["KINDS OF COPIES SUSPENDED"] == ["", "1"]
    assert rows["states in the host tier"] == ["", "3 of 4"]


def test_an_engine_that_starts_anew_has_no_rates(endpoint, capsys):
    before = text_of(looked_up_tokens=1000, found_tokens=900, num_failed_jobs=50)
    endpoint.texts = [before, text_of(looked_up_tokens=10, found_tokens=1, num_failed_jobs=3)]
    rows = shown(capsys, endpoint.address, "--count", "2", "--interval", "0.1")
    assert rows["hit rate of the host tier, behind it"] == ["-", "10.0%"]
    assert rows["failed copies"] == ["", "3 (+3 since this began)"]


def test_an_endpoint_that_stops_answering_keeps_its_numbers(endpoint, capsys):
    endpoint.texts = [text_of(looked_up_tokens=1000, found_tokens=900), None]
    assert main(["top", endpoint.address, "--count", "2", "--interval", "0.1"]) == 1
    said = capsys.readouterr().out
    assert "90.0%" in said
    assert "answers with status 503 (Service Unavailable)" in said
    assert said.index("503") < said.index("90.0%"), "what is wrong comes first"


def test_storage_tiers_are_shown():
    lines = [
        "# TYPE vllm:tpu_offload_tier_stored_chunks gauge",
        'vllm:tpu_offload_tier_stored_chunks{engine="0",tier="0:file"} 5',
        'vllm:tpu_offload_tier_stored_chunks{engine="1",tier="0:file"} 2',
        'vllm:tpu_offload_tier_stored_chunks{engine="0",tier="1:valkey"} 9',
    ]
    found = Scrape.parse(text_of(as_vllm=True) + "\n".join(lines) + "\n")
    assert {tier: values["num_stored_chunks"] for tier, values in found.tiers.items()} == {"0:file": 7, "1:valkey": 9}
    assert set(found.tiers["0:file"]) <= set(TierStats(tier="x").as_dict())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>", "answers with something else than metrics"),
        ("", "has no series tpu_offload_"),
        ("# TYPE a counter\na_total 3\n", "has no series tpu_offload_"),
    ],
)
def test_answers_that_are_no_metrics(endpoint, text, message):
    endpoint.texts = [text]
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert main(["top", endpoint.address]) == 2
    assert message in err.getvalue()
    assert err.getvalue().count("\n") == 1


class RawServer:
    """Answers each connection with these bytes, a piece at a time."""

    def __init__(self, *pieces, wait_s=0.0):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(pieces, wait_s))
        self._thread.start()

    def _serve(self, pieces, wait_s):
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                connection.recv(4096)
                for piece in pieces:
                    connection.sendall(piece)
                    self._done.wait(wait_s)

    def close(self):
        self._done.set()
        self._listener.close()
        self._thread.join()


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), "does not answer: "),
        ((b"HTTP/1.1 200 OK\r\nX: " + 70_000 * b"x" + b"\r\n\r\n",), "does not answer: "),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",), "the answer ends early"),
        ((b"HTTP/1.1 200 OK\r\n\r\n", *200 * (b"x",)), "the answer takes too long|timed out"),
    ],
    ids=["ssh", "long-header", "cut", "dripping"],
)
def test_servers_that_do_not_speak_well(pieces, message):
    drips = len(pieces) > 1
    server = RawServer(*pieces, wait_s=0.05 if drips else 0.0)
    try:
        with pytest.raises(InputError, match=message) as caught:
            Scrape.read(f"http://{server.address}/metrics", timeout_s=0.5 if drips else 60)
    finally:
        server.close()
    assert "\n" not in str(caught.value)


def test_names_with_brackets_are_shown_as_they_are(endpoint, capsys):
    endpoint.texts = [
        text_of(as_vllm=True) + "# TYPE vllm:tpu_offload_tier_stored_chunks gauge\n"
        'vllm:tpu_offload_tier_stored_chunks{tier="0:[/red]x"} 5\n'
    ]
    rows = shown(capsys, f"{endpoint.address}/metrics?name=[/x]", "--count", "1")
    assert rows["tier 0:[/red]x: stored chunks"] == ["", "5"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:abc/metrics", "is no address"),
        ("http://127.0.0.1:80 80/metrics", "is no address"),
        ("http://exa mple", "does not answer: "),
    ],
)
def test_addresses_that_are_none(url, says):
    with pytest.raises(InputError, match=says):
        Scrape.read(url)


def test_an_interval_that_is_no_number(endpoint, capsys):
    endpoint.texts = [text_of()]
    assert main(["top", endpoint.address, "--interval", "nan"]) == 2
    assert "nan is not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:1", "does not answer: "),
        ("file:///etc/passwd", "is no address; expected one like"),
        ("http:127.0.0.1", "is no address"),
        ("http:///metrics", "is no address"),
        ("http:x//y", "is no address"),
        ("http://127.0.0.1:1/metricé", "is no address"),
        ("HTTP://127.0.0.1:1/metrics", "does not answer: [Errno 111]"),
        ("http://127.0.0.1:99999", "is no address; expected one like"),
        ("http://[::1", "is no address; expected one like"),
    ],
)
def test_addresses_that_do_not_answer(url, message):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert main(["top", url]) == 2
    assert message in err.getvalue()


def test_only_web_addresses_are_read():
    with pytest.raises(InputError, match="is no address"):
        Scrape.read("ftp://x/metrics")
