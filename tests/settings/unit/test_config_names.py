"""The further names of settings: both eras of Dynamo's, either prefix, and names that set nothing here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvrouter.cli.commands import kvrouter
from kvrouter.cli.frontend.flags import frontend
from kvrouter.cli.setting_flags import ForeignOption, SettingsCommand, given_flags
from kvrouter.cli.up.flags import up
from kvrouter.core.errors import ConfigError
from kvrouter.settings.dynamo_settings import (
    FOREIGN,
    FOREIGN_DISCOVERY,
    FOREIGN_FIELDS,
    FOREIGN_MODES,
    FOREIGN_QUEUE_POLICIES,
    FOREIGN_VARIABLES,
    Foreign,
)
from kvrouter.settings.problems import parse_document
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.setting_spec import SettingKind, SettingSpec
from kvrouter.settings.sources import environment_of, environment_with, load_settings
from kvrouter.settings.tree import SETTINGS, Settings
from kvrouter.settings.variables import (
    ENGINE_KEY_VARIABLE,
    FLEET_VARIABLE,
    TOPOLOGY_VARIABLES,
    spellings,
    text_of,
    without_prefix,
)

SAMPLES = {
    SettingKind.WHOLE: ("7", "8"),
    SettingKind.NUMBER: ("0.5", "0.25"),
    SettingKind.SWITCH: ("true", "false"),
}
ALIASED = [spec for spec in SETTINGS if spec.aliases.flags or spec.aliases.variables or spec.aliases.names]
SEVERAL_NAMES = [spec for spec in SETTINGS if spec in ALIASED or len(spec.variables) > 1]


def texts_of(spec: SettingSpec) -> tuple[str, str]:
    if spec.choices:
        return spec.choices[0], spec.choices[1]
    return SAMPLES[spec.kind]


def flagged(*arguments: str) -> Settings:
    with up.make_context("up", list(arguments)) as context:
        return load_settings(flags=given_flags(context.params), environ={}).settings


def refused(flags: dict[str, object] | None = None, **sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(**{"flags": flags or {}, "environ": {}} | sources)  # type: ignore[arg-type]
    return caught.value.message


def flag_of(spec: SettingSpec, flag: str, text: str) -> list[str]:
    if spec.kind is not SettingKind.SWITCH:
        return [flag, text]
    return [flag if text == "true" else f"--no-{flag.removeprefix('--')}"]


@pytest.mark.parametrize("spec", SEVERAL_NAMES, ids=lambda spec: spec.name)
def test_every_name_of_a_setting_sets_it_and_two_that_differ_are_refused(spec: SettingSpec) -> None:
    if spec.kind in (SettingKind.TEXT, SettingKind.HIDDEN):
        one, other = "zone", "rack"
    elif spec.kind is SettingKind.WHOLE and spec.name == "nats_replicas":
        one, other = "3", "5"
    else:
        one, other = texts_of(spec)
    wanted = load_settings(flags={}, environ={spec.variable: one}).settings
    for name in spec.variables:
        assert load_settings(flags={}, environ={name: one}).settings == wanted
        if name == spec.variable:
            continue
        both = load_settings(flags={}, environ={spec.variable: one, name: f" {one} "})
        assert both.settings == wanted
        said = refused(environ={spec.variable: one, name: other})
        assert said.startswith(f"{name} ({spec.yaml_key}): {spec.variable} is the same setting, and differs")
    for flag in spec.flags:
        assert flagged(*flag_of(spec, flag, one)) == wanted
        if flag != spec.flag:
            assert spec.flag is not None
            with pytest.raises(ConfigError, match=f"{flag} .*: {spec.flag} is the same setting, and differs"):
                flagged(*flag_of(spec, spec.flag, one), *flag_of(spec, flag, other))
    for name in spec.aliases.names:
        document = parse_document(f"{spec.section}: {{{name}: {one}}}", "f.yaml")
        assert load_settings(flags={}, environ={}, document=document).settings == wanted
        twice = parse_document(f"{spec.section}: {{{spec.name}: {one}, {name}: {other}}}", "f.yaml")
        assert f"{spec.name} and {name} are one setting, and differ" in refused(document=twice)
        over = load_settings(flags={}, environ={spec.variable: other}, document=document).settings
        assert over == load_settings(flags={}, environ={spec.variable: other}).settings


def test_no_name_means_two_settings() -> None:
    for names in (
        [name for spec in SETTINGS for name in spec.variables],
        [flag for spec in SETTINGS for flag in spec.flags],
        [(spec.section, name) for spec in SETTINGS for name in (spec.name, *spec.aliases.names)],
    ):
        assert len(set(names)) == len(names)
    taken = {flag for spec in SETTINGS for flag in spec.flags}
    taken |= {name for spec in SETTINGS for name in spec.variables}
    taken |= {name for spec in SETTINGS for name in (spec.name, *spec.aliases.names)}
    for foreign in FOREIGN:
        assert not taken & {foreign.name, *foreign.flags, *foreign.variables}


def settings_commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from settings_commands(command)
        elif isinstance(command, SettingsCommand):
            yield command


COMMANDS = [*settings_commands(kvrouter)]
assert len(COMMANDS) > 5


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_no_flag_of_a_command_is_given_twice(command: click.Command) -> None:
    flags: list[str] = []
    for parameter in command.params:
        flags += [*parameter.opts, *parameter.secondary_opts]
    assert len(set(flags)) == len(flags)


def test_router_config_takes_field_names_of_both_dynamo_eras() -> None:
    dynamo: dict[str, Any] = {
        "overlap_score_weight": 2.0,
        "router_temperature": 0.5,
        "use_kv_events": False,
        "router_replica_sync": True,
        "router_track_active_blocks": False,
        "router_track_prefill_tokens": False,
        "router_snapshot_threshold": 5,
        "router_reset_states": True,
        "router_ttl_secs": 60.0,
        "router_max_tree_size": 1024,
        "router_prune_target_ratio": 0.5,
        "durable_kv_events": False,
        "router_assume_kv_reuse": True,
        "router_queue_threshold": None,
    }
    assert KvRouterConfig(**dynamo) == KvRouterConfig(
        overlap_score_weight=2.0,
        router_temperature=0.5,
        kv_events=False,
        replica_sync=True,
        track_active_blocks=False,
        track_prefill_tokens=False,
        snapshot_threshold=5,
        reset_states=True,
        router_ttl_s=60.0,
        router_max_tree_size=1024,
        router_prune_target_ratio=0.5,
    )
    twice: dict[str, Any] = {"kv_events": True, "use_kv_events": True}
    assert KvRouterConfig(**twice).kv_events
    with pytest.raises(ValidationError, match="kv_events and use_kv_events are one setting, and differ"):
        KvRouterConfig(**twice | {"use_kv_events": False})
    with pytest.raises(ValidationError, match="kv_events and use_kv_events"):
        KvRouterConfig(**twice | {"use_kv_events": 1})


def test_older_variable_turns_kv_events_off() -> None:
    assert not load_settings(flags={}, environ={"DYN_KV_EVENTS": "false"}).settings.router.kv_events


def test_kvrouter_prefix_stands_for_the_dyn_prefix() -> None:
    assert load_settings(flags={}, environ={"KVROUTER_HTTP_PORT": "9"}).settings.frontend.http_port == 9
    assert refused(environ={"KVROUTER_HTTP_PROT": "9"}) == (
        "KVROUTER_HTTP_PROT: unknown variable (did you mean DYN_HTTP_PORT?)"
    )
    said = load_settings(flags={}, environ={"DYN_BODY_MAX_BYTES": "9"}).warnings
    assert said == ("DYN_BODY_MAX_BYTES is not read (did you mean KVROUTER_BODY_MAX_BYTES?)",)


READ = sorted(
    {FLEET_VARIABLE, ENGINE_KEY_VARIABLE, *TOPOLOGY_VARIABLES, *(spec.variable for spec in SETTINGS)}
)
NAMED = {name for variable in (*READ, *FOREIGN_VARIABLES) for name in spellings(variable)}.union(
    *(spec.variables for spec in SETTINGS)
)


@given(st.sampled_from(READ), st.sampled_from(["KVROUTER_", "DYN_"]), st.booleans(), st.integers(0, 63))
@example("KVROUTER_FLEET", "DYN_", True, 0)
@example("KVROUTER_ENGINE_API_KEY", "DYN_", False, 3)
@example("DYN_HTTP_PORT", "KVROUTER_", True, 7)
def test_misspelt_variable_with_either_prefix_suggests_the_right_one(
    variable: str, prefix: str, swaps: bool, at: int
) -> None:
    right = without_prefix(variable)
    at %= len(right) - 1
    wrong = right[:at] + (right[at + 1] + right[at] if swaps else right[at + 1]) + right[at + 2 :]
    name = prefix + wrong
    assume(name not in NAMED)
    try:
        said = "\n".join(load_settings(flags={}, environ={name: "1"}).warnings)
    except ConfigError as error:
        said = error.message
    assert f"(did you mean {variable}?)" in said


@pytest.mark.parametrize("variable", [name for name in READ if name.startswith("DYN_")])
def test_every_dyn_variable_is_read_with_the_kvrouter_prefix(variable: str) -> None:
    ours = "KVROUTER_" + variable.removeprefix("DYN_")
    assert load_settings(flags={}, environ={ours: " "}) == (Settings(), ())
    assert text_of({ours: " a "}, variable) == "a"
    with pytest.raises(ConfigError, match=f"{variable} and {ours} are one setting, and differ"):
        text_of({ours: "a", variable: "b"}, variable)


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda each: each.name)
def test_name_without_effect_is_reported_in_every_source(foreign: Foreign) -> None:
    values = {SettingKind.SWITCH: (True, False), SettingKind.WHOLE: (77,), SettingKind.NUMBER: (0.77,)}
    unmet = [value for value in values.get(foreign.kind, ("other",)) if value not in foreign.met]
    for value in unmet:
        check_unmet(foreign, value)
    for met in (None, *foreign.met):
        if foreign.section == "router":
            assert KvRouterConfig.model_validate({foreign.name: met}) == KvRouterConfig()
        for name in foreign.variables:
            assert load_settings(flags={}, environ={name: str(met)}) == (Settings(), ())


def check_unmet(foreign: Foreign, value: object) -> None:
    text = str(value).lower()
    for name in foreign.variables:
        loaded = load_settings(flags={}, environ={name: text})
        assert loaded == (Settings(), (f"{name} {foreign.message}",))
        if name.startswith("DYN_"):
            ours = name.replace("DYN_", "KVROUTER_")
            assert refused(environ={ours: text}) == f"{ours}: {foreign.message}"
    for flag in foreign.flags:
        given = [flag, text]
        if foreign.kind is SettingKind.SWITCH:
            given = [flag if value else f"--no-{flag.removeprefix('--')}"]
        with pytest.raises(click.UsageError, match="has no effect here"):
            flagged(*given)
    if foreign.section != "router":
        return
    with pytest.raises(ValidationError, match=f"{foreign.name} has no effect here"):
        KvRouterConfig.model_validate({foreign.name: value})
    document = parse_document(f"router: {{{foreign.name}: {text}}}", "f.yaml")
    assert foreign.message in refused(document=document)


DYNAMO_NAMES = [
    line.split()
    for line in (Path(__file__).parents[2] / "data" / "dynamo-names.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("names", DYNAMO_NAMES, ids=lambda names: names[0])
def test_every_dynamo_name_belongs_to_one_setting_or_foreign_entry(names: list[str]) -> None:
    known = [{*spec.flags, *spec.variables} for spec in SETTINGS]
    known += [{*foreign.flags, *foreign.variables} for foreign in FOREIGN]
    found = [each for each in known if each & set(names)]
    assert len(found) == 1, "its names belong to several settings"
    assert set(names) <= found[0]
    flags = {option for parameter in frontend.params for option in parameter.opts}
    assert {name for name in names if name.startswith("--")} <= flags


DYNAMO_FIELDS = {
    "overlap_score_weight": None,
    "router_temperature": 0.0,
    "use_kv_events": True,
    "router_replica_sync": False,
    "router_track_active_blocks": True,
    "router_assume_kv_reuse": True,
    "router_track_prefill_tokens": True,
    "router_prefill_load_model": "none",
    "router_ttl_secs": 120.0,
    "router_approximate_cache_policy": "ttl",
    "router_queue_threshold": None,
    "router_event_threads": 4,
    "router_queue_policy": "fcfs",
    "use_remote_indexer": False,
    "serve_indexer": False,
    "enable_session_prefix_index": False,
    "shared_cache_multiplier": None,
    "shared_cache_type": "none",
    "router_predicted_ttl_secs": None,
    "conditional_disagg_enabled": False,
    "conditional_disagg_policy": "isl_bounding",
    "conditional_disagg_eff_isl_threshold": 2048,
    "conditional_disagg_eff_isl_ratio_threshold": 0.7,
    "conditional_disagg_prefill_busy_threshold": None,
    "conditional_disagg_decode_busy_threshold": None,
    "overlap_score_credit": 1.0,
    "overlap_score_credit_decay": 0.0,
    "prefill_load_scale": 1.0,
    "decode_active_request_weight": 0.0,
    "router_policy_config": None,
    "router_prefill_policy": None,
    "router_decode_policy": None,
    "router_tracking_hash": "public-xxh3-v1",
    "router_tracking_key_file": None,
    "router_tracking_key_id": None,
}
"""The fields of Dynamo 1.6.1's ``KvRouterConfig`` with their defaults, but for those of :data:`UNLIKE`."""

UNLIKE: dict[str, object] = {
    "router_track_output_blocks": False,
    "host_cache_hit_weight": 0.75,
    "disk_cache_hit_weight": 0.25,
}
"""Its fields whose defaults ask for what is not done here."""


def test_dynamo_configuration_of_defaults_equals_the_default_config() -> None:
    given = {name: value for name, value in DYNAMO_FIELDS.items() if name != "overlap_score_weight"}
    assert KvRouterConfig.model_validate(given) == KvRouterConfig()


@pytest.mark.parametrize("name", [*DYNAMO_FIELDS, *UNLIKE])
def test_every_dynamo_configuration_field_is_known(name: str) -> None:
    router = [spec for spec in SETTINGS if spec.section == "router"]
    own = {known for spec in router for known in (spec.name, *spec.aliases.names)}
    assert (name in own) != (name in FOREIGN_FIELDS)
    if name in UNLIKE:
        with pytest.raises(ValidationError, match=f"{name} has no effect here"):
            KvRouterConfig.model_validate({name: UNLIKE[name]})


@pytest.mark.parametrize("mode", ["power-of-two", "direct", "least-loaded", "device-aware-weighted"])
def test_unsupported_dynamo_router_mode_names_the_alternative(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"--router-mode .router.router_mode.: '{mode}' is not supported: "):
        flagged("--router-mode", mode)
    assert refused(environ={"DYN_ROUTER_MODE": mode}).startswith("DYN_ROUTER_MODE (router.router_mode): ")
    with pytest.raises(ValidationError, match=f"'{mode}' is not supported: {FOREIGN_MODES[mode]}"):
        KvRouterConfig.model_validate({"router_mode": mode})


def test_unsupported_dynamo_queue_policy_names_the_alternative() -> None:
    said = refused(environ={"DYN_ROUTER_QUEUE_POLICY": "wspt"})
    assert said.startswith("DYN_ROUTER_QUEUE_POLICY (router.router_queue_policy): ")
    assert said.endswith(f"'wspt' is not supported: {FOREIGN_QUEUE_POLICIES['wspt']}")


@pytest.mark.parametrize("backend", ["etcd", "mem"])
def test_unsupported_dynamo_discovery_names_the_alternative(backend: str) -> None:
    said = refused(environ={"DYN_DISCOVERY_BACKEND": backend})
    assert said.startswith("DYN_DISCOVERY_BACKEND (planes.discovery): ")
    assert said.endswith(f"'{backend}' is not supported: {FOREIGN_DISCOVERY[backend]}")


def test_none_unsets_a_number_that_may_be_unset() -> None:
    document = parse_document("router: {busy_threshold: 0.5}", "f.yaml")
    for text in ("None", " none "):
        environ = {"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": text}
        settings = load_settings(flags={}, environ=environ, document=document).settings
        assert settings.router.active_decode_blocks_threshold is None
        handed = environment_of(settings, "router")
        again = load_settings(flags={}, environ=handed, document=document).settings
        assert again == settings
    assert "must be a number" in refused(environ={"DYN_ROUTER_TEMPERATURE": "none"})


def test_foreign_names_are_unique() -> None:
    names = [foreign.name for foreign in FOREIGN]
    assert len(set(names)) == len(names)
    assert len(FOREIGN_VARIABLES) == sum(len(foreign.variables) for foreign in FOREIGN)
    hidden = [option for option in up.params if isinstance(option, ForeignOption)]
    assert len(hidden) == sum(len(foreign.flags) for foreign in FOREIGN)


def test_child_process_gets_no_other_names_of_an_overruled_setting() -> None:
    own = {"DYN_ROUTER_TTL_SECS": "6", "KVROUTER_HTTP_PORT": "7", "PATH": "/bin", "DYN_ROUTER_MODE": "random"}
    flags = {"router.router_ttl_s": "5", "frontend.http_port": "8"}
    settings = load_settings(flags=flags, environ=own).settings
    handed = environment_with(own, settings, "router", "frontend")
    assert load_settings(flags={}, environ=handed).settings == settings
    assert handed["PATH"] == "/bin"


def test_dynamo_fields_of_other_sections_are_no_router_fields() -> None:
    names = [foreign.name for foreign in FOREIGN if foreign.section != "router"]
    assert names
    for name in names:
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            KvRouterConfig.model_validate({name: None})
