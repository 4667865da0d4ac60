"""Write what is made from the Helm chart: manifests for kustomize, and the table of its values.

``python -m scripts.write_manifests`` writes them; with ``--check`` it writes nothing, names each file that is
not what the chart says, and exits 1 when there is one. Helm itself renders the chart, in this process.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from scripts.generated_files import write_or_check

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "kvrouter"
NAMESPACE = "kvrouter-system"
MADE = "# Made by `make docs` from the Helm chart: change the chart, not this file.\n"
YAML_WIDTH = 110

Manifest = dict[str, Any]

WITHOUT_WEBHOOK: dict[str, object] = {"bindingWebhook": False}
VARIANTS: dict[str, dict[str, object]] = {
    "default": {"admission": WITHOUT_WEBHOOK},
    "cert-manager": {"admission": WITHOUT_WEBHOOK, "certificate": {"from": "certManager"}},
    "nats": {
        "admission": WITHOUT_WEBHOOK,
        "nats": {"enabled": True},
        "fleets": {"discovery": "nats"},
    },
    "binding-webhook": {"admission": {"bindingWebhook": True}},
}
"""The values of each folder of ``deploy/kustomize``."""

ALONE = {"binding-webhook": "MutatingWebhookConfiguration"}
"""Folders with objects of one kind, next to what another folder has."""

MONITORING: dict[str, object] = {
    "serviceMonitor": {"enabled": True},
    **dict.fromkeys(("frontendMonitor", "engineMonitor", "alerts"), True),
}
"""The values of ``metrics`` for ``deploy/monitoring``, which has the dashboards as files."""

MONITORING_KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")

OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")
"""Labels that are true of what Helm installs, and of nothing else."""

TABLE_BEGINS, TABLE_ENDS = "<!-- values: made by `make docs` -->\n", "<!-- end of values -->\n"
VALUE = re.compile(r"^(?P<indent> *)(?P<key>[a-zA-Z]+):")
MEANING = re.compile(r"^ *# -- (?P<meaning>.+)$")


def kustomize_yaml(folder: str) -> str:
    """Return what a folder holds: a release's manifests, its namespace first and without Helm's hooks."""
    kind = ALONE.get(folder)
    rendered = _rendered(VARIANTS[folder])
    return _dumped(each for each in (_namespace(), *rendered) if kind in (None, each["kind"]))


def monitoring_yaml() -> str:
    """Return the monitors and the alerts as the Prometheus operator takes them."""
    rendered = _rendered({"admission": WITHOUT_WEBHOOK, "metrics": MONITORING})
    return _dumped(each for each in rendered if each["kind"] in MONITORING_KINDS)


def _rendered(values: dict[str, object]) -> list[Manifest]:
    """A release's manifests, without Helm's hooks."""
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="kvrouter", namespace=NAMESPACE)
    return [
        manifest
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest and "helm.sh/hook" not in manifest["metadata"].get("annotations", {})
    ]


def _dumped(manifests: Iterable[Manifest]) -> str:
    plain = [_without(manifest) for manifest in manifests]
    return MADE + yaml.safe_dump_all(plain, sort_keys=False, width=YAML_WIDTH, allow_unicode=True)


def values_table() -> str:
    """Return a row for each value of the chart: its name, its default and what it means.

    Raises ValueError for a value that has no comment.
    """
    rows = ["| value | default | |\n", "|---|---|---|\n"]
    for name, default, meaning in _values():
        rows.append(f"| `{name}` | {_shown(default)} | {meaning} |\n")
    return "".join(rows)


def readme() -> str:
    """Return the chart's README with the table of today."""
    text = (CHART / "README.md").read_text("utf-8")
    before, _, rest = text.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}{values_table()}{TABLE_ENDS}{after}"


def files() -> dict[Path, Callable[[], str]]:
    """Return what writes each file."""
    made: dict[Path, Callable[[], str]] = {
        CHART / "README.md": readme,
        ROOT / "deploy" / "monitoring" / "monitors-and-alerts.yaml": monitoring_yaml,
    }
    for folder in VARIANTS:
        made[ROOT / "deploy" / "kustomize" / folder / "kvrouter.yaml"] = partial(kustomize_yaml, folder)
    return made


def main(arguments: list[str]) -> int:
    """Write the files, or check them; return the exit code."""
    return write_or_check(files(), arguments, script="write_manifests", root=ROOT)


def _namespace() -> Manifest:
    labels = {"app.kubernetes.io/part-of": "kvrouter", "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def _without(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _without(value) for key, value in thing.items() if key not in OF_HELM}
    return [_without(each) for each in thing] if isinstance(thing, list) else thing


def _values() -> Iterator[tuple[str, object, str]]:
    """Name, default and meaning of each value, in the order of the file."""
    text = (CHART / "values.yaml").read_text("utf-8")
    defaults = yaml.safe_load(text)
    path: list[str] = []
    meaning = ""
    reported_at = -1
    for line in text.splitlines():
        if reported := MEANING.match(line):
            meaning = reported["meaning"]
        if not (found := VALUE.match(line)):
            continue
        depth = len(found["indent"]) // 2
        if depth > reported_at >= 0:
            continue  # inside of a value that was counted as a whole
        reported_at = -1
        path[depth:] = [found["key"]]
        default = defaults
        for key in path:
            default = default[key]
        if meaning:
            yield ".".join(path), default, meaning
            meaning, reported_at = "", depth
        elif not isinstance(default, dict) or not default:
            raise ValueError(f"{'.'.join(path)} of values.yaml needs a comment: # -- what it means")


def _shown(default: object) -> str:
    return "" if default == "" else f"`{json.dumps(default) if not isinstance(default, str) else default}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
