"""What kubelets tell of Services is no setting, however they are called; all else is reported as before."""

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.settings.sources import load_settings
from kvrouter.settings.variables import without_service_links
from tests.testing.service_variables import Service, ServicePort, service_variables

HTTP = ServicePort(8000, "http")
KVROUTER = Service("kvrouter", "10.0.0.7", (HTTP,))


def test_variables_of_a_service_named_kvrouter_are_no_settings() -> None:
    environ = service_variables([KVROUTER])
    assert environ == {
        "KVROUTER_SERVICE_HOST": "10.0.0.7",
        "KVROUTER_SERVICE_PORT": "8000",
        "KVROUTER_SERVICE_PORT_HTTP": "8000",
        "KVROUTER_PORT": "tcp://10.0.0.7:8000",
        "KVROUTER_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "KVROUTER_PORT_8000_TCP_PROTO": "tcp",
        "KVROUTER_PORT_8000_TCP_PORT": "8000",
        "KVROUTER_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    assert without_service_links(environ) == {}
    assert load_settings(flags={}, environ=environ) == load_settings(flags={}, environ={})


@pytest.mark.parametrize(
    "service",
    [
        Service("kvrouter-frontend", "10.0.0.7", (HTTP, ServicePort(9090, "metrics"))),
        Service("kvrouter-dns", "fd00::7", (ServicePort(53, "dns", "UDP"), ServicePort(53, "dns-tcp"))),
        Service("dyn", "10.0.0.7", (ServicePort(1),)),
        Service("dyn-http", "10.0.0.7", (HTTP,)),
        Service("kvrouter-http", "10.0.0.7", (HTTP,)),
        Service("kvrouter-health", "10.0.0.7", (ServicePort(65_535, "8000-tcp", "SCTP"),)),
        Service("kvrouter-listen", "10.0.0.7", (HTTP,)),
    ],
    ids=lambda service: service.name,
)
def test_service_variables_never_change_settings_even_with_equal_names(
    service: Service,
) -> None:
    environ = service_variables([service])
    assert load_settings(flags={}, environ=environ) == load_settings(flags={}, environ={})


def test_services_that_make_the_same_variable_are_both_recognized() -> None:
    both = (KVROUTER, Service("kvrouter-service", "10.0.0.8", (ServicePort(9000, "http"),)))
    assert (
        without_service_links(service_variables(both))
        == without_service_links(service_variables(both[::-1]))
        == {}
    )


def test_setting_with_the_name_of_a_service_variable_is_kept() -> None:
    environ = {
        **service_variables([Service("kvrouter-http", "10.0.0.7", (HTTP,))]),
        "KVROUTER_HTTP_PORT": "8000",
    }
    assert without_service_links(environ) == {"KVROUTER_HTTP_PORT": "8000"}
    assert load_settings(flags={}, environ=environ).settings.frontend.http_port == 8000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVROUTER_PORT", "tcp://10.0.0.8:8000"),
        ("KVROUTER_PORT", "8000"),
        ("KVROUTER_PORT", ""),
        ("KVROUTER_SERVICE_PORT", "9000"),
        ("KVROUTER_SERVICE_PORT_HTTPS", "443"),
        ("KVROUTER_PORTS", "tcp://10.0.0.7:8000"),
        ("KVROUTER_PORT_9000_TCP", "tcp://10.0.0.7:9000"),
        ("KVROUTER_X_SERVICE_HOST", "10.0.0.7"),
        ("KVROUTER_RETRY_MAX", "8000"),
        ("KVROUTER_RETRY_MAX_SERVICE_PORT", "8000"),
    ],
)
def test_variable_that_no_kubelet_writes_is_refused_beside_a_service(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(flags={}, environ={**service_variables([KVROUTER]), name: value})
    assert str(refused.value).startswith(f"{name}: unknown variable")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(service_variables([KVROUTER])))
def test_lone_service_variable_is_refused_as_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: unknown variable"):
        load_settings(flags={}, environ={name: service_variables([KVROUTER])[name]})
