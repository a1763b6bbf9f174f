"""An exporter for Prometheus: serves the numbers of one engine over HTTP.

Values are read when Prometheus scrapes, on the exporter's thread, so an idle engine shows its present state: what tiers
have written after the last step is counted. What only a step can see is not: the scheduler learns in its next step that
a job of a tier has ended, and until then its slots stay pinned, as the gauges say.

It reads ``stats()`` and ``histograms()``, which any thread may call. They change nothing, take only locks that guard
counts, and copy what the scheduler's thread may change in one operation of the interpreter. So a scrape can neither
delay nor end an engine; it may see a request counted in one family and not yet in the next.
"""

import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvtier.config import DEFAULT_METRICS_HOST, MAX_PORT
from kvtier.errors import ConfigError, MissingExtraError
from kvtier.histogram import HistogramSnapshot
from kvtier.observe.family import Family, Kind, MetricsSource, Sample, SampleFinder
from kvtier.observe.metrics import FAMILIES

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from prometheus_client import Metric

logger = logging.getLogger(__name__)


MAX_CLIENTS = 16
"""Connections at a time, each with a thread and a descriptor of the engine's process. A scrape takes milliseconds."""

SILENCE_S = 10.0
"""Seconds for which a client may send nothing, or not read its page. Less would drop a slow scraper."""


class PageHandler(WSGIRequestHandler):
    """One connection: answers a request and says nothing about it."""

    timeout = SILENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Log nothing."""


class PageServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are ``MAX_CLIENTS`` at most.

    Who can connect needs no leave to, so one more connection ends the oldest: clients that send half a request
    use up no descriptors of the process, and hold the page until the next ones come. ``_lock`` guards the connections.

    Args:
        host: the address to listen on.
        port: where; 0 takes any free one.
        app: makes the page.

    Raises:
        OSError: the port or the address cannot be had.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, app: "WSGIApplication") -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__((str(address[0]), port), PageHandler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind without asking a name server what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - two kinds of server
        """Answer in a thread of its own, in place of the oldest connection where there are too many."""
        with self._lock:
            if len(self._open) >= MAX_CLIENTS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread finds its end, and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as above
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as above
        """Say nothing of a client that has gone, or was too slow: the base class prints a traceback."""
        logger.debug("metrics: a connection from %s has failed", client_address, exc_info=True)


class MetricsServer:
    """Serves the metrics of one engine until it is closed.

    Args:
        source: whose numbers to serve.
        port: where; 0 takes any free one.
        host: the address to listen on.

    Attributes:
        port: where it serves.
        url: address of the page.

    Raises:
        MissingExtraError: prometheus-client is not installed.
        ConfigError: the port is taken or cannot be had, or the host is no address of this machine.
    """

    def __init__(self, source: MetricsSource, port: int, host: str = DEFAULT_METRICS_HOST) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise MissingExtraError(error.name or "prometheus_client", "observe") from error
        if not 0 <= port <= MAX_PORT:
            raise ConfigError("metrics_port", port, f"must be a port: 0 to {MAX_PORT}")
        # A registry of its own: what else the process exports, and under which names, is not ours.
        registry = CollectorRegistry()
        registry.register(EngineCollector(source))
        try:
            self._server = PageServer(host, port, make_wsgi_app(registry))
        except OSError as error:
            remedy = f"cannot be served on {host}: {error.strerror}; choose a free port, or 0 for any"
            raise ConfigError("metrics_port", port, remedy) from error
        self.port = int(self._server.server_port)
        self.url = f"http://{host}:{self.port}/metrics"
        self._is_closed = False
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvtier-metrics", daemon=True)
        self._thread.start()
        logger.info("metrics: %s", self.url)

    def close(self) -> None:
        """End the server and free its port; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(source: MetricsSource, port: int, host: str = DEFAULT_METRICS_HOST) -> MetricsServer:
    """Serve the metrics of an engine over HTTP, from threads of their own, until the server is closed.

    Args:
        source: an engine, or the scheduler half of the connector (``OffloadingConnectorScheduler``).
        port: where; 0 takes any free one.
        host: the address to listen on; the page has no authentication.

    Raises:
        MissingExtraError: prometheus-client is not installed.
        ConfigError: the port is taken or cannot be had, or the host is no address of this machine.
    """
    return MetricsServer(source, port, host)


class HasMetricsSettings(Protocol):
    """The settings that say where to serve; ``kvtier.config.Settings`` has them."""

    @property
    def metrics_port(self) -> int | None:
        """Where; None does not."""

    @property
    def metrics_host(self) -> str:
        """The address to listen on."""


def open_metrics(source: MetricsSource, settings: HasMetricsSettings) -> MetricsServer | None:
    """Serve the metrics of an engine if its settings say so; None otherwise. Raises as ``serve_metrics``."""
    if settings.metrics_port is None:
        return None
    return serve_metrics(source, settings.metrics_port, settings.metrics_host)


class EngineCollector:
    """Makes Prometheus' families out of an engine's numbers, at each scrape.

    Args:
        source: whose numbers.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._finder = SampleFinder(FAMILIES)

    def describe(self) -> Iterator["Metric"]:
        """Yield the families without samples, so that registering reads nothing of the engine."""
        for family in FAMILIES:
            yield _empty(family)

    def collect(self) -> Iterator["Metric"]:
        """Yield each family that has a sample now."""
        numbers = gather(self._source.stats(), self._finder)
        snapshots = gather(self._source.histograms(), self._finder)
        for family in FAMILIES:
            samples = {**numbers.get(family, {}), **snapshots.get(family, {})}
            if samples:
                yield make_metric(family, samples)


def gather(values: Mapping[str, Any], finder: SampleFinder) -> dict[Family, dict[tuple[str, ...], Any]]:
    """Return the values by family and labels; those that no family reads are left out.

    Any: numbers or snapshots, as they came.
    """
    found: dict[Family, dict[tuple[str, ...], Any]] = defaultdict(dict)  # Any: as above
    for name, value in values.items():
        sample: Sample | None = finder.find(name)
        if sample is not None:
            found[sample.family][sample.label_values] = value
    return found


def make_metric(family: Family, samples: Mapping[tuple[str, ...], float | HistogramSnapshot]) -> "Metric":
    """Return a family of prometheus-client with its samples, by the values of their labels. Pure."""
    metric = _empty(family)
    for label_values, value in samples.items():
        if isinstance(value, HistogramSnapshot):
            metric.add_metric(label_values, buckets_of(value), value.sum)
        else:
            metric.add_metric(label_values, value)
    return metric


def buckets_of(snapshot: HistogramSnapshot) -> list[tuple[str, int]]:
    """Return the buckets as Prometheus has them: upper end, and observations up to it. Pure."""
    ends = [*map(repr, map(float, snapshot.bounds)), "+Inf"]
    return list(zip(ends, accumulate(snapshot.counts), strict=True))


def _empty(family: Family) -> Any:  # noqa: ANN401 - one of three classes, with different add_metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind is Kind.HISTOGRAM:
        return HistogramMetricFamily(family.name, family.help, labels=family.labels)
    kinds = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}
    return kinds[family.kind](family.name, family.help, labels=family.labels)
