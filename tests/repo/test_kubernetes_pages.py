"""The pages on Kubernetes name what there is: every reason, and nothing that is none."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

import kvrouter.operator
from kvrouter.app.attach import pod_fleet
from kvrouter.core import errors
from kvrouter.core.errors import KvrouterError, Reason
from kvrouter.operator.labels.level_labels import Source
from kvrouter.operator.status.finding import AVAILABLE, DOMAIN_BALANCED, READY, TOPOLOGY_RESOLVED, UPGRADING
from kvrouter.telemetry import Event

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text("utf-8") for path in sorted(DOCS.glob("kubernetes-*.md"))}
GUIDES = {
    "tutorial": PAGES["kubernetes-tutorial.md"],
    "verify and troubleshoot": PAGES["kubernetes-operate.md"].partition("\n## Verify the deployment\n")[2],
}
"""The texts that name symptoms."""

TROUBLESHOOTING = PAGES["kubernetes-operate.md"].partition("\n## Troubleshooting on Kubernetes\n")[2]

MADE_HERE = {READY, AVAILABLE, TOPOLOGY_RESOLVED, DOMAIN_BALANCED, UPGRADING}
MADE_HERE |= {"KvrouterNodePlaces", "KvrouterWorker"}
OF_KUBERNETES = {
    "ErrImagePull",
    "NotFound",
    "PodSecurity",
    "Pending",
    "Ignore",
    "ReplicaSet",
    "ScheduleAnyway",
    "DoNotSchedule",
}
IN_ANSWERS = {"cross_domain", "fallback_used", "kv_transfer_domain", "topology_domains"}
"""Fields of answers and cards."""

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]+))?\)")
VALUE = re.compile(r"^((?:image|fleets|admission|certificate|rbac|nats|metrics)\.[A-Za-z.]+[A-Za-z])")


def reasons() -> set[str]:
    """Every reason of a condition or an event that the operator and engines in pods have."""
    found = {pod_fleet.JOINED, pod_fleet.MISTAKEN, pod_fleet.REFUSED}
    found |= {source.value for source in Source if not source.is_found}
    for path in Path(kvrouter.operator.__file__).parent.rglob("*.py"):
        found |= set(_said(ast.parse(path.read_text("utf-8"))))
    return found


def _said(tree: ast.Module) -> Iterator[str]:
    """The second argument of each ``Finding(…)``, ``….record(…)`` and ``….record_once(…)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            name = ast.unparse(node.func).rpartition(".")[2]
            word = node.args[1]
            if name in ("Finding", "record", "record_once") and isinstance(word, ast.Constant):
                yield str(word.value)


def codes() -> set[str]:
    """The code of every error that a client may get."""
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    return {each.code for each in classes if issubclass(each, KvrouterError)} | {
        "not_ready",
        "decision_not_found",
    }


def named(page: str) -> set[str]:
    """What stands in backticks, one word each."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    return {word.strip(",.;:") for found in CODE.findall(text) for word in found.split()}


def test_the_operators_reasons_are_found() -> None:
    assert {"AllPodsReady", "DomainWithoutDecode", "LabelsNotCopied", "NameTaken", "Applied"} <= reasons()


def test_every_operator_reason_is_on_the_troubleshooting_page() -> None:
    assert reasons() - named(TROUBLESHOOTING) == set()


def test_every_worker_refusal_reason_has_a_row_with_its_fix() -> None:
    assert "](http-api.md#errors)" in TROUBLESHOOTING
    table = (DOCS / "http-api.md").read_text("utf-8").partition("\n| in `refusals` | means | fix |\n")[2]
    rows = [row.split(" | ")[0] for row in table.partition("\n\n")[0].splitlines()]
    assert {reason.value for reason in Reason} == named("\n".join(rows))


@pytest.mark.parametrize("page", GUIDES.values(), ids=GUIDES)
def test_every_reason_named_on_a_page_exists(page: str) -> None:
    words = {word for word in named(page) if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", word)}
    assert words - reasons() - MADE_HERE - OF_KUBERNETES == set()


@pytest.mark.parametrize("page", GUIDES.values(), ids=GUIDES)
def test_every_named_log_event_code_and_field_exists(page: str) -> None:
    words = {word for word in named(page) if re.fullmatch(r"[a-z]+(?:_[a-z]+)+", word)}
    metrics = {word for word in words if word.startswith("kvrouter_")}
    known = {event.value for event in Event} | {reason.value for reason in Reason} | codes() | IN_ANSWERS
    assert words - metrics - known == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_named_metric_exists(page: str) -> None:
    table = set(re.findall(r"`(kvrouter_[a-z_]+)`", (DOCS / "metrics.md").read_text("utf-8")))
    found = set(re.findall(r"`(kvrouter_[a-z_]+[a-z])(?=[{`])", PAGES[page]))
    assert found - table == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_named_chart_value_exists(page: str) -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "kvrouter" / "values.yaml").read_text("utf-8"))
    found = {match[1] for text in CODE.findall(PAGES[page]) if (match := VALUE.match(text))}
    assert {path for path in found if not _has(values, path.split("."))} == set()


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "architecture.md"])
def test_every_link_has_an_existing_target(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    broken = []
    for path, anchor in LINK.findall(text):
        if path.startswith("http"):
            continue
        target = (DOCS / page).parent / path if path else DOCS / page
        is_broken = not target.exists() or (anchor and anchor not in _anchors(target.read_text("utf-8")))
        broken += [f"{path}#{anchor}"] if is_broken else []
    assert broken == []


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _has(values: object, path: list[str]) -> bool:
    if not path:
        return True
    return isinstance(values, Mapping) and path[0] in values and _has(values[path[0]], path[1:])


def test_no_page_uses_force_conflicts() -> None:
    """The API server refuses that by itself, and only preflight, which looked, may say how to go on."""
    files = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*")]
    assert [str(path) for path in files if path.is_file() and "--force-conflicts" in path.read_text()] == []
