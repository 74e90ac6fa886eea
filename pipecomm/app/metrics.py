"""The numbers of a rank's steps as Prometheus metrics, served over HTTP if asked."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipecomm.engine.report import StepReport
from pipecomm.engine.result import StepResult
from pipecomm.errors import ConfigError, NotBuiltError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["StepMetrics"]

# Seconds of a step: from what a test takes to what the largest models do.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class StepMetrics:
    """Metrics of one rank, which all have the label `rank`; needs the extra pipecomm[metrics].

    `registry` is a prometheus_client registry, by default the process's own, which a program that
    serves metrics already serves: it is made once there. `observe` takes the result of each step.

    Raises NotBuiltError without prometheus_client, ConfigError for a registry that has them.
    """

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        self._client = _client()
        self._registry: CollectorRegistry = registry or self._client.REGISTRY
        self._rank = str(rank)
        self._servers: list[Any] = []
        try:
            self._make()
        except ValueError as error:
            raise ConfigError(
                f"expected a registry without the metrics of pipecomm; got one with them "
                f"({error}): make one StepMetrics a process, or give each a registry"
            ) from None

    def _make(self) -> None:
        self._step_s = self._client.Histogram(
            "pipecomm_step_seconds",
            "Duration of a training step.",
            ["rank"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._compute_s = self._counter(
            "compute_seconds", "Time spent in forward and backward passes."
        )
        self._wait_s = self._counter("wait_seconds", "Time spent waiting for other stages.")
        self._exposed_s = self._counter(
            "exposed_communication_seconds", "Part of the waiting with the message on its way."
        )
        self._payload = self._counter("payload_bytes", "Bytes of the tensors sent and received.")
        self._wire = self._counter("wire_bytes", "Bytes that crossed for them.")
        self._left_out = self._counter("updates_left_out", "Updates with gradients not finite.")
        self._bubble = self._gauge("bubble_ratio", "Share of the last step without compute.")
        self._kept = self._gauge("peak_activations", "Most microbatches kept in the last step.")
        self._loss = self._gauge("loss", "Loss of the last step, where the last stage is.")
        self._planned_s = self._gauge(
            "planned_step_seconds", "What the schedule makes of the measured times."
        )
        self._memory = self._gauge("memory_bytes", "Peak memory, as in the report of a step.")

    def _counter(self, name: str, text: str) -> Any:
        labels = ["rank", "way"] if name.endswith("_bytes") else ["rank"]
        return self._client.Counter(f"pipecomm_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Any:
        return self._client.Gauge(f"pipecomm_{name}", text, ["rank"], registry=self._registry)

    def observe(self, result: StepResult, report: StepReport | None = None) -> None:
        """Count one step; `report`, of the same step, adds the plan and the memory."""
        stats, rank = result.stats, self._rank
        self._step_s.labels(rank).observe(stats.step_s)
        self._compute_s.labels(rank).inc(stats.compute_s)
        self._wait_s.labels(rank).inc(stats.wait_s)
        self._exposed_s.labels(rank).inc(stats.exposed_comm_s)
        self._payload.labels(rank, "sent").inc(stats.payload_nbytes_sent)
        self._payload.labels(rank, "received").inc(stats.payload_nbytes_received)
        self._wire.labels(rank, "sent").inc(stats.wire_nbytes_sent)
        self._wire.labels(rank, "received").inc(stats.wire_nbytes_received)
        self._left_out.labels(rank).inc(stats.updates_left_out)
        self._bubble.labels(rank).set(stats.bubble)
        self._kept.labels(rank).set(stats.peak_activations)
        if result.loss is not None:
            self._loss.labels(rank).set(result.loss)
        if report is not None:
            self._planned_s.labels(rank).set(report.planned.step_s)
            self._memory.labels(rank).set(report.ranks[int(rank)].memory_nbytes)

    def serve(self, port: int, address: str = "127.0.0.1") -> int:
        """Serve the registry at http://address:port/metrics until close(); 0 takes a free port.

        Gives the port. Only this host can read it unless `address` says otherwise. Raises
        ConfigError where nobody can listen there.
        """
        try:
            server, thread = self._client.start_http_server(port, address, self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"expected an address and a free port for metrics; got {address}:{port}: {error}"
            ) from None
        self._servers.append((server, thread))
        return int(server.server_address[1])

    def close(self) -> None:
        """Stop serving. Idempotent; the metrics stay in their registry."""
        while self._servers:
            server, thread = self._servers.pop()
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> StepMetrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise NotBuiltError(
            f"expected prometheus_client for metrics; got {error}: pip install 'pipecomm[metrics]'"
        ) from None
    return prometheus_client
