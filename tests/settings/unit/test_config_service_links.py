"""What kubelets tell of Services is no setting, however they are called; all else is reported as before."""

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.settings.sources import load_settings
from kvrouter.settings.variables import without_service_links
from tests.testing.service_variables import Service, ServicePort, service_variables

HTTP = ServicePort(8000, "http")
KVROUTER = Service("kvrouter", "10.0.0.7", (HTTP,))


def test_a_service_called_as_we_are_is_reported_by_nine_variables_none_of_which_is_a_setting() -> None:
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
def test_no_service_says_anything_of_settings_even_where_a_setting_has_the_same_name(
    service: Service,
) -> None:
    environ = service_variables([service])
    assert load_settings(flags={}, environ=environ) == load_settings(flags={}, environ={})


def test_of_services_that_make_the_same_variable_both_are_known() -> None:
    both = (KVROUTER, Service("kvrouter-service", "10.0.0.8", (ServicePort(9000, "http"),)))
    assert (
        without_service_links(service_variables(both))
        == without_service_links(service_variables(both[::-1]))
        == {}
    )


def test_a_setting_with_a_service_of_the_same_name_is_the_settings() -> None:
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
def test_what_no_kubelet_says_is_reported_as_a_mistake_though_a_service_is_there(
    name: str, value: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(flags={}, environ={**service_variables([KVROUTER]), name: value})
    assert str(refused.value).startswith(f"{name}: unknown variable")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(service_variables([KVROUTER])))
def test_a_single_variable_of_that_shape_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: unknown variable"):
        load_settings(flags={}, environ={name: service_variables([KVROUTER])[name]})
