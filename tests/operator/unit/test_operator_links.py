"""Links in a status: what a frontend's page says of them, and which changes are shown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.operator.api.status import LINKS_MAX, DeploymentStatus, LinkStatus
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.status.link_status import MetricsEndpoint, metrics_endpoint, read_links, steadied
from kvrouter.operator.status.status import deployment_status
from kvrouter.telemetry import Telemetry
from tests.testing.deployment_statuses import NOW, SERVING, settled
from tests.testing.planned_deployments import DEFAULTS, FACTS, deployment, planned

ZONES = "between two values of zone"


def link(
    name: str = ZONES,
    bandwidth: int = 12_000_000_000,
    latency_s: float = 0.002,
    *,
    slow: bool = False,
    model: str = "llama",
) -> LinkStatus:
    return LinkStatus(
        model=model,
        link=name,
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=latency_s,
        slow=slow,
    )


def page(*links: LinkStatus) -> list[bytes]:
    """The lines of a frontend's own page that has these links."""
    telemetry = Telemetry()
    names = [(each.model, each.link) for each in links]
    telemetry.link_bandwidth.replace(
        {name: each.bandwidth_bytes_per_second for name, each in zip(names, links, strict=True)}
    )
    telemetry.link_latency.replace(
        {name: each.latency_seconds for name, each in zip(names, links, strict=True)}
    )
    telemetry.link_slow.replace({name: float(each.slow) for name, each in zip(names, links, strict=True)})
    return telemetry.render().splitlines()


# What a page says.


def test_the_links_of_a_frontends_page_are_read_slow_ones_first() -> None:
    links = [
        link("within one zone"),
        link(slow=True),
        link(model="a"),
        link("zone=a to zone=b", model="a", slow=True),
    ]
    assert read_links(page(*links)) == (links[3], links[1], links[2], links[0])


def test_escaped_names_of_links_are_unescaped_when_read() -> None:
    links = (link(r'a\nb "quoted" \ {x="y"} 1,'), link("ü, model=", model='say "\\"'))
    assert set(read_links(page(*links))) == set(links)


def test_numbers_of_links_are_rounded_to_two_digits() -> None:
    lines = page(link(bandwidth=12_345_678_901, latency_s=0.0012345))
    assert read_links(lines) == (link(bandwidth=12_000_000_000, latency_s=0.0012),)


def test_slow_link_is_shown_first_where_links_exceed_the_limit() -> None:
    slow = link("zz", slow=True)
    found = read_links(page(*(link(f"link {number}") for number in range(2 * LINKS_MAX)), slow))
    assert len(found) == LINKS_MAX
    assert found[0] == slow


def changed(pattern: str, by: str) -> list[bytes]:
    """The page of one link with ``pattern`` replaced, which has to be there."""
    lines = [re.subn(pattern, by, line.decode()) for line in page(link())]
    assert any(n for _, n in lines)
    return [line.encode() for line, _ in lines]


@pytest.mark.parametrize(
    "number", ["NaN", "+Inf", "-1.0", "1e999", "0x10", "", "1 2", "--", "e", "1_0", "9" * 33]
)
@pytest.mark.parametrize("what", ["bandwidth_bytes_per_second", "latency_seconds", "slow"])
def test_link_with_an_invalid_number_is_not_shown(what: str, number: str) -> None:
    assert read_links(changed(rf"(kvrouter_link_{what}{{.*}}) \S+$", rf"\1 {number}")) == ()


@pytest.mark.parametrize(
    ("what", "number"),
    [("bandwidth_bytes_per_second", "0.0"), ("bandwidth_bytes_per_second", "1e19"), ("slow", "0.5")],
)
def test_link_with_a_number_out_of_range_is_not_shown(what: str, number: str) -> None:
    assert read_links(changed(rf"(kvrouter_link_{what}{{.*}}) \S+$", rf"\1 {number}")) == ()


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        ("llama", ""),
        ("llama", "m" * 513),
        (ZONES, "l" * 2049),
        (ZONES, "a\x1b[31m"),
        (ZONES, r"a\\nb"),
        (ZONES, r"a\\tb"),
        (ZONES, 'a"b'),
        ("model=", "link="),
        ("model=", "models="),
        ('model="llama"', 'model="llama",zone="a"'),
        (",", ""),
        ("}", ""),
        ("kvrouter_link_latency", "kvrouter_link_latenci"),
    ],
)
def test_link_with_an_invalid_name_or_label_is_not_shown(pattern: str, by: str) -> None:
    assert read_links(changed(f"(?<!#){pattern}", by)) == ()


def test_undecodable_line_does_not_spoil_other_lines() -> None:
    assert read_links([b"kvrouter_link_slow{\xff", *page(link()), b"kvrouter_link_slow{"]) == (link(),)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.text(alphabet='kvrouter_link_slow{}model="\\n, 1.', max_size=200).map(
                lambda text: f"kvrouter_link_slow{{{text}".encode()
            ),
        ),
        max_size=20,
    )
)
def test_random_lines_are_read_as_no_links(lines: list[bytes]) -> None:
    assert read_links(lines) == ()


# What is shown.


@pytest.mark.parametrize(
    "found", [link(bandwidth=14_000_000_000), link(bandwidth=9_700_000_000), link(latency_s=0.0024)]
)
def test_numbers_within_tolerance_keep_their_shown_values(found: LinkStatus) -> None:
    assert steadied([link()], [found]) == (link(),)


@pytest.mark.parametrize("found", [link(bandwidth=16_000_000_000), link(latency_s=0.0026)])
def test_numbers_beyond_tolerance_replace_the_shown_values(found: LinkStatus) -> None:
    assert steadied([link()], [found]) == (found,)


def test_latencies_too_short_to_matter_count_as_equal() -> None:
    assert steadied([link(latency_s=0.0)], [link(latency_s=1e-4)]) == (link(latency_s=0.0),)


def test_link_that_becomes_slow_shows_its_current_numbers() -> None:
    slow = link(bandwidth=11_000_000_000, slow=True)
    assert steadied([link()], [slow]) == (slow,)


def test_links_appear_and_disappear_with_the_latest_reading() -> None:
    other = link("within one zone")
    assert steadied([link()], [other]) == (other,)
    assert steadied([link()], []) == ()


def status(*links: LinkStatus) -> DeploymentStatus:
    of = deployment(types=("frontend", "decode"))
    return deployment_status(
        of,
        planned(of),
        FACTS,
        components=settled(of),
        pods=[],
        previous=None,
        now=NOW,
        workers=SERVING,
        links=links,
    )


def test_links_in_a_status_have_camel_case_fields_and_read_back() -> None:
    manifest = status(link(slow=True)).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert manifest["links"] == [
        {
            "model": "llama",
            "link": ZONES,
            "bandwidthBytesPerSecond": 12_000_000_000,
            "latencySeconds": 0.002,
            "slow": True,
        }
    ]
    assert DeploymentStatus.model_validate(manifest, by_alias=True, by_name=False) == status(link(slow=True))


def test_status_without_known_links_has_no_links_field() -> None:
    assert "links" not in status().model_dump(mode="json", by_alias=True, exclude_none=True)


# Where a page is read.


def frontend(name: str, *, address: str | None = "10.0.0.1", ready: bool = True, over: bool = False) -> Pod:
    return Pod(
        name,
        labels={"kvrouter.dev/component": "frontend", "kvrouter.dev/component-type": "frontend"},
        is_ready=ready,
        is_over=over,
        address=address,
    )


def endpoint(*pods: Pod, port: str | None = None) -> MetricsEndpoint | None:
    variables: list[JsonValue] = [] if port is None else [{"name": "DYN_HTTP_PORT", "value": port}]
    template: JsonValue = {"spec": {"containers": [{"name": "main", "env": variables}]}}
    return metrics_endpoint(planned(deployment(pods={"frontend": template}), defaults=DEFAULTS), pods)


def test_the_first_ready_frontend_by_name_is_read() -> None:
    first = frontend("b", address="10.0.0.2")
    others = [frontend("c"), frontend("a", ready=False), frontend("aa", over=True)]
    assert endpoint(others[0], first, *others[1:]) == MetricsEndpoint("10.0.0.2", 8000)


def test_metrics_endpoint_port_is_that_of_the_service() -> None:
    assert endpoint(frontend("a"), port="9000") == MetricsEndpoint("10.0.0.1", 9000)


def test_worker_pods_are_not_read_for_links() -> None:
    worker = Pod("a", labels={"kvrouter.dev/component": "decode"}, is_ready=True, address="10.0.0.1")
    assert endpoint(worker) is None


@pytest.mark.parametrize("address", [None, "", "example.com", "10.0.0.1/x?"])
def test_frontend_without_a_valid_address_is_not_read(address: str | None) -> None:
    assert endpoint(frontend("a", address=address)) is None


def test_ipv4_and_ipv6_addresses_make_a_metrics_url() -> None:
    assert MetricsEndpoint("10.0.0.1", 8000).url == "http://10.0.0.1:8000/metrics"
    assert MetricsEndpoint("fd00::1", 8000).url == "http://[fd00::1]:8000/metrics"
