"""The numbers of a rank's steps as Prometheus metrics."""

from pipecomm.app.metrics import StepMetrics

__all__ = ["StepMetrics"]
