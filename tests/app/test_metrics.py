"""Metrics of steps: what Prometheus reads is what the steps took, and the dashboard knows it."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path

import prometheus_client
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import pipecomm
from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.result import StepResult
from pipecomm.errors import ConfigError, NotBuiltError
from pipecomm.metrics import StepMetrics

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(nn.Linear(3, 3), num_microbatches=2, loss_fn=nn.functional.mse_loss)


def step(pipeline: Pipeline) -> StepResult:
    return pipeline.train_step(torch.randn(4, 3), torch.randn(4, 3))


def values(text: str) -> dict[str, float]:
    """By name, and by the label "way" where there is one."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["rank"] == "0"
            way = sample.labels.get("way")
            if "le" not in sample.labels and not sample.name.endswith("_created"):
                found[f"{sample.name} {way}" if way else sample.name] = sample.value
    return found


def served(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_numbers_of_all_steps_are_served(pipeline: Pipeline) -> None:
    with StepMetrics(0, CollectorRegistry()) as metrics:
        port = metrics.serve(0)
        results = [step(pipeline) for _ in range(3)]
        for result in results:
            metrics.observe(result)
        found = values(served(port))
    stats = [result.stats for result in results]
    assert found["pipecomm_step_seconds_count"] == 3
    assert found["pipecomm_step_seconds_sum"] == pytest.approx(sum(s.step_s for s in stats))
    assert found["pipecomm_compute_seconds_total"] == pytest.approx(sum(s.compute_s for s in stats))
    assert found["pipecomm_bubble_ratio"] == pytest.approx(stats[-1].bubble)
    assert found["pipecomm_loss"] == pytest.approx(results[-1].loss)
    assert found["pipecomm_peak_activations"] == 1
    assert found["pipecomm_wire_bytes_total sent"] == 0


def test_report_adds_the_plan_and_memory(pipeline: Pipeline) -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(0, registry)
    result = step(pipeline)
    report = pipeline.report(result)
    metrics.observe(result, report)
    found = values(prometheus_client.generate_latest(registry).decode())
    assert found["pipecomm_planned_step_seconds"] == pytest.approx(report.planned.step_s)
    assert found["pipecomm_memory_bytes"] == report.ranks[0].memory_nbytes


def test_a_closed_server_frees_its_port() -> None:
    metrics = StepMetrics(0, CollectorRegistry())
    port = metrics.serve(0)
    metrics.close()
    metrics.close()
    with StepMetrics(0, CollectorRegistry()) as other:
        assert other.serve(port) == port


def test_only_this_host_can_read_unless_asked_for() -> None:
    with StepMetrics(0, CollectorRegistry()) as metrics:
        metrics.serve(0)
        ((server, _),) = metrics._servers
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("address", ["192.0.2.1", "no host of this name.invalid"])
def test_address_that_is_not_ours_is_refused(address: str) -> None:
    with (
        StepMetrics(0, CollectorRegistry()) as metrics,
        pytest.raises(ConfigError, match="expected an address and a free port for metrics; got"),
    ):
        metrics.serve(0, address)


def test_port_in_use_is_refused() -> None:
    with StepMetrics(0, CollectorRegistry()) as one, StepMetrics(0, CollectorRegistry()) as other:
        port = one.serve(0)
        with pytest.raises(ConfigError, match=str(port)):
            other.serve(port)


def test_a_second_set_in_a_registry_is_refused() -> None:
    registry = CollectorRegistry()
    StepMetrics(0, registry)
    with pytest.raises(ConfigError, match="give each a registry"):
        StepMetrics(0, registry)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NotBuiltError, match=r"pip install 'pipecomm\[metrics\]'"):
        StepMetrics(0)


def queried(dashboard: str) -> set[str]:
    return set(re.findall(r"pipecomm_\w+", " ".join(expressions(json.loads(dashboard)))))


def expressions(dashboard: dict[str, object]) -> list[str]:
    panels = dashboard["panels"]
    assert isinstance(panels, list)
    return [target["expr"] for panel in panels for target in panel["targets"]]


def offered(pipeline: Pipeline) -> set[str]:
    registry = CollectorRegistry()
    metrics = StepMetrics(0, registry)
    result = step(pipeline)
    metrics.observe(result, pipeline.report(result))
    text = prometheus_client.generate_latest(registry).decode()
    return {
        sample.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_dashboard_asks_for_what_there_is_and_for_all_of_it(pipeline: Pipeline) -> None:
    asked, there = queried(DASHBOARD.read_text()), offered(pipeline)
    assert asked <= there
    # Of a histogram the buckets are enough.
    unseen = {name for name in there - asked if not name.startswith("pipecomm_step_seconds")}
    assert unseen == set()


def test_dashboard_that_asks_for_something_else_is_seen(pipeline: Pipeline) -> None:
    wrong = DASHBOARD.read_text().replace("pipecomm_bubble_ratio", "pipecomm_bubbles")
    assert not queried(wrong) <= offered(pipeline)


def test_importing_the_package_does_not_need_the_client() -> None:
    assert "metrics" not in pipecomm.__all__
