"""The metrics that Ray's agent exports, and a real Prometheus server that scrapes them, if one is installed."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.head import free_ports
from tests.support.waiting import wait_until


def find_prometheus() -> str | None:
    return shutil.which("prometheus")


def agent_address() -> str:
    """Returns the address at which the agent of the driver's node exports metrics."""
    [node_] = [node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()]
    return f"{node_['NodeManagerAddress']}:{node_['MetricsExportPort']}"


def exported_metrics(run: str) -> dict[tuple[str, str], float]:
    """Returns the metrics of a run that the agent exports now, by name and cause; most have no cause."""
    with urllib.request.urlopen(f"http://{agent_address()}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.labels.get("run") == run]
    return {(sample.name, sample.labels.get("cause", "")): sample.value for sample in samples}


class PrometheusServer:
    """A Prometheus that scrapes the agent once a second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        """Returns the answer of its API.

        Raises:
            AssertionError: It refuses the query.
        """
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            # The server answers with 503 while it starts.
            if error.code == 503:
                raise
            raise AssertionError(f"{path} {query}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the current series of an expression."""
        return list(self.get("query", query=expression)["result"])


@contextmanager
def start_prometheus(program: str, folder: Path) -> Iterator[PrometheusServer]:
    [port] = free_ports(1)
    jobs = [{"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": [agent_address()]}]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": jobs}))
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = PrometheusServer(f"http://127.0.0.1:{port}")

    def scraped() -> bool:
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        try:
            return [series["value"][1] for series in server.query("up")] == ["1"]
        except OSError:
            return False

    try:
        wait_until(scraped, "Prometheus has not scraped", 60)
        yield server
    finally:
        process.kill()
        process.wait()
