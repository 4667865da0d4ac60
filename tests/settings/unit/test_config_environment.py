"""A process is given the settings of another one as variables: it runs with the same."""

from pydantic import SecretStr

from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.sources import environment_of, load_settings
from kvrouter.settings.tree import FrontendSettings, Settings


def test_environment_of_settings_has_only_set_values_and_reads_back() -> None:
    settings = Settings(
        router=KvRouterConfig(kv_events=False, router_temperature=0.0),
        frontend=FrontendSettings(http_port=8001, admin_token=SecretStr("s")),
        planes=PlaneSettings(namespace="n", plane_token=SecretStr("secret")),
    )
    environ = environment_of(settings, "router", "frontend", "planes", "log")
    assert environ == {
        "DYN_ROUTER_USE_KV_EVENTS": "false",
        "DYN_ROUTER_TEMPERATURE": "0.0",
        "DYN_HTTP_PORT": "8001",
        "KVROUTER_ADMIN_TOKEN": "s",
        "DYN_NAMESPACE": "n",
        "KVROUTER_PLANE_TOKEN": "secret",
    }
    loaded = load_settings(flags={}, environ=environ)
    assert (loaded.settings, loaded.warnings) == (settings, ())
    assert set(environment_of(settings, "planes")) == {"DYN_NAMESPACE", "KVROUTER_PLANE_TOKEN"}


def test_setting_changed_by_a_copy_is_in_the_environment() -> None:
    planes = PlaneSettings().model_copy(update={"nats_server": "nats://here"})
    assert environment_of(Settings(planes=planes), "planes") == {"NATS_SERVER": "nats://here"}
