"""A real Prometheus with the shipped alerts, and an Alertmanager that hears what fires."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.system.monitoring.install import prometheus_program
from tests.testing.processes import free_ports

ALERTS = Path(__file__).parents[3] / "deploy" / "monitoring" / "alerts.yaml"
LIMIT_S = 90.0
"""Only a test that fails waits as long as this."""

INTERVAL = "500ms"
"""Of scrapes, and of the evaluation of rules."""

Json = dict[str, Any]


def shortened(rules: str) -> Json:
    """The shipped rules with other times, and nothing else changed.

    ``for`` is a second. Windows of minutes are 5 s, the day that times are compared with is 60 s before the
    last 5 s. The hour in which something was there is left as it is.
    """
    found: Json = yaml.safe_load(rules)
    for group in found["groups"]:
        for rule in group["rules"]:
            rule["for"] = "1s"
            rule["expr"] = re.sub(r"\[\d+m\]", "[5s]", rule["expr"]).replace(
                "[1d] offset 1h", "[60s] offset 5s"
            )
    return found


class Alertmanager:
    """Takes what Prometheus sends as Alertmanager would. ``namespace`` of a target tells the tests apart."""

    def __init__(self) -> None:
        self._fired: dict[tuple[str, str], Json] = {}
        self._changed = threading.Condition()

    def received(self, alerts: list[Json]) -> None:
        """These alerts fire, or did."""
        with self._changed:
            for alert in alerts:
                self._fired[alert["labels"].get("namespace", ""), alert["labels"]["alertname"]] = alert
            self._changed.notify_all()

    def fired(self, namespace: str) -> set[str]:
        """The names of the alerts that have fired in a namespace."""
        with self._changed:
            return {name for where, name in self._fired if where == namespace}

    def wait_for(self, name: str, namespace: str) -> Json:
        """Return the alert, with its labels and annotations, once it fires; fail when it does not."""
        with self._changed:
            fires = self._changed.wait_for(lambda: (namespace, name) in self._fired, LIMIT_S)
            assert fires, f"{name} does not fire in {namespace}; these do: {sorted(self._fired)}"
            return self._fired[namespace, name]


class Prometheus:
    """Scrapes what it is given."""

    def __init__(self, folder: Path, url: str, alertmanager: Alertmanager) -> None:
        self._targets = folder / "targets.json"
        self._scraped: list[Json] = []
        self._writing = threading.Lock()
        self.http = httpx.Client(base_url=url, timeout=30.0)
        self.alertmanager = alertmanager

    def scrape(self, namespace: str, address: str, path: str = "/metrics") -> None:
        """Scrape a page from now on."""
        labels = {"namespace": namespace, "job": "kvrouter", "__metrics_path__": path}
        with self._writing:
            self._scraped.append({"targets": [address], "labels": labels})
            replacing = self._targets.with_suffix(".new")
            replacing.write_text(json.dumps(self._scraped))
            replacing.rename(self._targets)

    def query(self, expr: str) -> list[Json]:
        """What an expression is now. Fails when Prometheus does not take it."""
        answer = self.http.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        found: list[Json] = answer["data"]["result"]
        return found

    def rules(self) -> dict[str, Json]:
        """The alerts that it has, by name."""
        groups = self.http.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}


@contextmanager
def running(folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with its files in ``folder``, until the block ends."""
    alertmanager = Alertmanager()
    with _receiving(alertmanager) as receiver:
        (folder / "rules.yaml").write_text(yaml.safe_dump(shortened(ALERTS.read_text())))
        (folder / "targets.json").write_text("[]")
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(_config(receiver)))
        port = free_ports(1)
        command = [
            str(prometheus_program()),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        prometheus = Prometheus(folder, f"http://127.0.0.1:{port}", alertmanager)
        try:
            _wait_until_ready(prometheus, process, folder / "log")
            yield prometheus
        finally:
            prometheus.http.close()
            process.terminate()
            process.wait(30)


def _config(receiver: str) -> Json:
    return {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["rules.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [receiver]}]}]},
        "scrape_configs": [
            {"job_name": "kvrouter", "honor_labels": True, "file_sd_configs": [{"files": ["targets.json"]}]}
        ],
    }


@contextmanager
def _receiving(alertmanager: Alertmanager) -> Iterator[str]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            alertmanager.received(json.loads(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _wait_until_ready(prometheus: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    last_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < last_s:
        try:
            if prometheus.http.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)  # nothing says when it is ready, but that it answers
    raise AssertionError(f"Prometheus does not start:\n{log.read_text()}")
