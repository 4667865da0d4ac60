"""What ``kvrouter doctor`` says of the fleet of a test."""

from kvrouter.api.client import RouterClient
from kvrouter.cli.doctor.diagnosis import diagnose
from kvrouter.cli.doctor.findings import Finding, Report, Severity
from kvrouter.cli.doctor.flags import DoctorOptions
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.frontend_harness import FrontendHarness
from tests.testing.mock_server import MODEL, MockServer, user, words

UNTIMED = KvRouterConfig(router_cost="blocks")
"""A router that judges nothing by how long it took: mock engines that are sped up measure the machine."""


async def run_doctor(
    here: MockServer | FrontendHarness | str, *others: str, options: DoctorOptions | None = None
) -> Report:
    """Ask a router, by its URL or as what a test holds of it, and others of its fleet."""
    urls = [here if isinstance(here, str) else url_of(here), *others]
    router, *further = map(RouterClient, urls)
    return await diagnose(router, further, options)


def url_of(here: MockServer | FrontendHarness) -> str:
    """Where a test's router listens."""
    if isinstance(here, MockServer):
        return here.url
    host, port = here.address
    return f"http://{host}:{port}"


def findings_of(report: Report, check: str, severity: Severity | None = None) -> list[Finding]:
    """What a check found: of one severity, or of any."""
    of_check = [each for each in report.findings if each.check == check]
    return [each for each in of_check if severity in (None, each.severity)]


def only_finding(report: Report, check: str, severity: Severity) -> Finding:
    """The only thing that a check found, which is as bad as that, and says what to do."""
    (finding,) = findings_of(report, check)
    assert finding.severity is severity
    assert finding.seen
    assert finding.why
    assert finding.remedy
    assert check not in {each.check for each in report.passed}
    return finding


def skipped_checks(report: Report, check: str) -> list[str]:
    """Why a check could not be made, for each subject."""
    return [f"{each.subject}: {each.why}" for each in report.not_made if each.check == check]


def without_data(report: Report, check: str) -> list[str]:
    """Why a check had not enough data for a verdict, for each subject."""
    return [f"{each.subject}: {each.why}" for each in report.not_enough if each.check == check]


def failed_checks(report: Report) -> set[str]:
    """The checks that found anything."""
    return {each.check for each in report.findings}


async def send_chats(here: MockServer, *, n: int, **nvext: object) -> list[int]:
    """Chats of which each third one is the same; their statuses."""
    statuses = []
    for number in range(n):
        body = {"model": MODEL, "messages": user(words(first=number % 3, n=200)), "max_tokens": 2}
        sent = {**body, "nvext": nvext}
        statuses.append((await here.http.post("/v1/chat/completions", json=sent)).status_code)
    return statuses
