"""The further names of settings: both eras of Dynamo's, either prefix, and names that set nothing here."""

from typing import Any

import click
import pytest
from pydantic import ValidationError

from kvrouter.cli.commands import kvrouter, up
from kvrouter.cli.flags import ForeignOption, given_flags
from kvrouter.config import KvRouterConfig, Settings, load_settings, parse_document
from kvrouter.config.environment import environment_with
from kvrouter.config.foreign import FOREIGN, FOREIGN_FIELDS, FOREIGN_VARIABLES
from kvrouter.config.setting import Kind, SettingSpec
from kvrouter.config.tree import SETTINGS
from kvrouter.core.errors import ConfigError

SAMPLES = {Kind.WHOLE: ("7", "8"), Kind.NUMBER: ("0.5", "0.25"), Kind.SWITCH: ("true", "false")}
ALIASED = [spec for spec in SETTINGS if spec.aliases.flags or spec.aliases.variables or spec.aliases.names]


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
    if spec.kind is not Kind.SWITCH:
        return [flag, text]
    return [flag if text == "true" else f"--no-{flag.removeprefix('--')}"]


@pytest.mark.parametrize("spec", SETTINGS, ids=lambda spec: spec.name)
def test_every_name_of_a_setting_sets_it_and_two_that_differ_are_refused(spec: SettingSpec) -> None:
    if spec not in ALIASED and len(spec.variables) == 1:
        return
    if spec.kind in (Kind.TEXT, Kind.HIDDEN):
        one, other = "zone", "rack"
    elif spec.kind is Kind.WHOLE and spec.name == "nats_replicas":
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


@pytest.mark.parametrize("command", ["up", "frontend", "router"])
def test_no_flag_of_a_command_is_given_twice(command: str) -> None:
    flags: list[str] = []
    for parameter in kvrouter.commands[command].params:
        flags += [*parameter.opts, *parameter.secondary_opts]
    assert len(set(flags)) == len(flags)


def test_the_fields_of_both_eras_make_one_configuration() -> None:
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


def test_kv_events_are_off_by_the_older_variable() -> None:
    assert not load_settings(flags={}, environ={"DYN_KV_EVENTS": "false"}).settings.router.kv_events


def test_our_prefix_stands_for_the_shared_one() -> None:
    assert load_settings(flags={}, environ={"KVROUTER_HTTP_PORT": "9"}).settings.frontend.http_port == 9
    assert refused(environ={"KVROUTER_HTTP_PROT": "9"}) == (
        "KVROUTER_HTTP_PROT: unknown variable (did you mean DYN_HTTP_PORT?)"
    )
    said = load_settings(flags={}, environ={"DYN_BODY_MAX_BYTES": "9"}).warnings
    assert said == ("DYN_BODY_MAX_BYTES is not read (did you mean KVROUTER_BODY_MAX_BYTES?)",)


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda each: each.name)
def test_a_name_without_effect_says_so_wherever_it_stands(foreign: Any) -> None:
    unmet = {Kind.SWITCH: not foreign.met or not foreign.met[0], Kind.WHOLE: 77, Kind.NUMBER: 0.77}
    value = unmet.get(foreign.kind, "other")
    text = str(value).lower()
    for name in foreign.variables:
        loaded = load_settings(flags={}, environ={name: text})
        assert loaded == (Settings(), (f"{name} {foreign.told}",))
        ours = name.replace("DYN_", "KVROUTER_")
        assert refused(environ={ours: text}) == f"{ours}: {foreign.told}"
    for flag in foreign.flags:
        given = [flag, text]
        if foreign.kind is Kind.SWITCH:
            given = [flag if value else f"--no-{flag.removeprefix('--')}"]
        with pytest.raises(click.UsageError, match="has no effect here"):
            flagged(*given)
    with pytest.raises(ValidationError, match=f"{foreign.name} has no effect here"):
        KvRouterConfig.model_validate({foreign.name: value})
    document = parse_document(f"router: {{{foreign.name}: {text}}}", "f.yaml")
    assert foreign.told in refused(document=document)
    for met in (None, *foreign.met):
        assert KvRouterConfig.model_validate({foreign.name: met}) == KvRouterConfig()
        assert load_settings(flags={}, environ={foreign.variables[0]: str(met)}) == (Settings(), ())


def test_foreign_names_are_named_once() -> None:
    assert len(FOREIGN_FIELDS) == len(FOREIGN)
    assert len(FOREIGN_VARIABLES) == sum(len(foreign.variables) for foreign in FOREIGN)
    hidden = [option for option in up.params if isinstance(option, ForeignOption)]
    assert len(hidden) == sum(len(foreign.flags) for foreign in FOREIGN)


def test_a_process_is_not_handed_the_other_names_of_what_a_flag_overruled() -> None:
    own = {"DYN_ROUTER_TTL_SECS": "6", "KVROUTER_HTTP_PORT": "7", "PATH": "/bin", "DYN_ROUTER_MODE": "random"}
    flags = {"router.router_ttl_s": "5", "frontend.http_port": "8"}
    settings = load_settings(flags=flags, environ=own).settings
    handed = environment_with(own, settings, "router", "frontend")
    assert load_settings(flags={}, environ=handed).settings == settings
    assert handed["PATH"] == "/bin"
