"""Whatever Services there are, what kubelets say of them changes no setting and hides no mistake."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.settings.variables import without_service_links
from tests.testing.service_variables import Service, ServicePort, service_variables

WORDS = ("http", "x", "frontend", "health", "listen", "retries-max", "2")
NAMES = st.lists(st.sampled_from(WORDS), max_size=2).flatmap(
    lambda words: st.sampled_from(["-".join((first, *words)) for first in ("kvrouter", "dyn", "nats", "llm")])
)
PORTS = st.lists(
    st.builds(
        ServicePort,
        st.integers(1, 65_535),
        st.sampled_from(("", "http", "grpc-web", "8000-tcp")),
        st.sampled_from(("TCP", "UDP", "SCTP")),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda port: (port.number, port.protocol),
).map(tuple)
ADDRESSES = st.ip_addresses().map(str)
SERVICES = st.lists(st.builds(Service, NAMES, ADDRESSES, PORTS), max_size=4, unique_by=lambda each: each.name)
OWN = st.dictionaries(
    st.sampled_from(("KVROUTER_HTTP_PORT", "DYN_HTTP_PORT", "KVROUTER_RETRIES_MAX", "KVROUTER_PORT", "PATH")),
    st.sampled_from(("8000", "tcp", "10.0.0.1", "")),
)
OURS = ("KVROUTER_", "DYN_")


@given(SERVICES, OWN)
def test_service_link_variables_are_dropped_and_no_others(
    services: list[Service], own: Mapping[str, str]
) -> None:
    reported = service_variables(services)
    others = {name: value for name, value in reported.items() if not name.startswith(OURS)}
    assert without_service_links({**reported, **own}) == {**others, **own}


@given(st.builds(Service, NAMES, ADDRESSES, PORTS), st.data())
def test_service_link_variable_with_another_value_is_kept(service: Service, data: st.DataObject) -> None:
    reported = service_variables([service])
    changed = data.draw(st.sampled_from(sorted(reported)))
    value = data.draw(st.text(max_size=8).filter(lambda text: text not in reported.values()))
    assert without_service_links({**reported, changed: value})[changed] == value
