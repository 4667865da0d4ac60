"""The settings tree: precedence, origins in messages, refusals."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.settings.problems import parse_document
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.setting_spec import SettingKind, parse_switch
from kvrouter.settings.sources import load_settings
from kvrouter.settings.tree import SETTINGS, Settings


def refused(**sources: object) -> str:
    arguments: dict[str, object] = {"flags": {}, "environ": {}} | sources
    with pytest.raises(ConfigError) as caught:
        load_settings(**arguments)  # type: ignore[arg-type]
    return caught.value.message


def test_router_and_port_defaults_are_the_expected_ones() -> None:
    router = Settings().router
    assert router.router_mode is RouterMode.KV
    assert router.overlap_score_weight == 1.0
    assert router.router_temperature == 0.0
    assert router.kv_events
    assert router.track_active_blocks
    assert router.active_decode_blocks_threshold is None
    assert router.active_prefill_tokens_threshold is None
    assert (router.router_ttl_s, router.router_max_tree_size, router.router_prune_target_ratio) == (
        120.0,
        1_048_576,
        0.8,
    )
    assert (router.admission_queue_max, router.admission_wait_s, router.router_domain_wait_s) == (0, 0.0, 0.0)
    assert router.kv_transfer_topology_level is None
    assert router.kv_transfer_mismatch_policy == "fail"
    assert Settings().frontend.http_port == 8000


WEIGHT = "overlap_score_weight is stated"


@pytest.mark.parametrize(
    ("sources", "cost", "reason"),
    [
        ({}, "time", "default"),
        ({"environ": {"DYN_KV_OVERLAP_SCORE_WEIGHT": ""}}, "time", "default"),
        ({"environ": {"DYN_KV_OVERLAP_SCORE_WEIGHT": "1.0"}}, "blocks", WEIGHT),
        ({"environ": {"DYN_OVERLAP_SCORE_WEIGHT": "1"}}, "blocks", WEIGHT),
        ({"flags": {"router.overlap_score_weight": "1"}}, "blocks", WEIGHT),
        ({"flags": {"router.overlap_score_weight": "2.5"}}, "blocks", WEIGHT),
        ({"document": "router: {overlap_score_weight: 1.0}"}, "blocks", WEIGHT),
        ({"document": "router: {kv_overlap_score_weight: 0}"}, "blocks", WEIGHT),
        ({"document": "router: {kv_transfer_weight: 2}"}, "blocks", "kv_transfer_weight is stated"),
        ({"document": "router: {kv_transfer_weight: 0}"}, "time", "default"),
        (
            {"document": "router: {router_cost: time, overlap_score_weight: 1}"},
            "time",
            "router_cost is stated",
        ),
        (
            {"document": "router: {router_pd_selection: joint, overlap_score_weight: 1}"},
            "time",
            "router_pd_selection is joint",
        ),
    ],
)
def test_a_stated_weight_of_blocks_means_their_cost_whatever_its_value(
    sources: dict[str, object], cost: str, reason: str
) -> None:
    text = sources.get("document")
    document = parse_document(str(text), "fleet.yaml") if text is not None else None
    given: dict[str, object] = {"flags": {}, "environ": {}} | sources | {"document": document}
    router = load_settings(**given).settings.router  # type: ignore[arg-type]
    assert (router.cost, router.cost_reason) == (cost, reason)
    assert KvRouterConfig().cost_reason == "default"
    assert KvRouterConfig(overlap_score_weight=1.0).cost_reason == WEIGHT


def test_flags_win_over_variables_over_yaml_over_defaults() -> None:
    document = parse_document("router: {router_temperature: 0.1, retries_max: 1, router_ttl_s: 5}", "f.yaml")
    loaded = load_settings(
        flags={"router.router_temperature": "0.3"},
        environ={"DYN_ROUTER_TEMPERATURE": "0.2", "KVROUTER_RETRIES_MAX": "0"},
        document=document,
    )
    assert loaded.settings.router.router_temperature == 0.3
    assert loaded.settings.router.retries_max == 0
    assert loaded.settings.router.router_ttl_s == 5
    assert loaded.settings.router.overlap_score_weight == 1.0


def test_every_setting_can_come_from_every_source() -> None:
    samples = {
        SettingKind.WHOLE: "1100",
        SettingKind.NUMBER: "0.5",
        SettingKind.TEXT: "zone",
        SettingKind.HIDDEN: "word",
    }
    for spec in SETTINGS:
        text = samples.get(spec.kind, "false" if spec.default else "true")
        if spec.choices:
            text = next(choice for choice in spec.choices if choice != spec.default)
        if spec.name in {"write_low_water_bytes", "retries_max"}:
            text = "7"
        if spec.name == "nats_replicas":
            text = "3"
        if spec.name == "other_clusters":
            text = "west=/etc/west.yaml"
        if spec.name == "write_high_water_bytes":
            text = "20000"
        if spec.name in {"write_overflow_bytes", "file_bytes"}:
            text = "200000"
        if spec.name == "total_bytes":
            text = "200000000"
        by_variable = load_settings(flags={}, environ={spec.variable: text}).settings
        by_yaml = load_settings(
            flags={},
            environ={},
            document=parse_document(f"{spec.section}: {{{spec.name}: {text}}}", "f.yaml"),
        ).settings
        assert by_variable == by_yaml, spec.yaml_key
        assert by_variable != Settings(), spec.yaml_key
        if spec.flag is not None:
            assert load_settings(flags={spec.yaml_key: text}, environ={}).settings == by_yaml


def test_each_setting_is_named_once_and_described() -> None:
    for names in (
        [spec.variable for spec in SETTINGS],
        [spec.flag for spec in SETTINGS if spec.flag],
        [spec.name for spec in SETTINGS],
    ):
        assert len(set(names)) == len(names)
    for spec in SETTINGS:
        assert spec.meaning.endswith("."), spec.yaml_key
        assert re.fullmatch(r"(DYN|KVROUTER|NATS|KUBERNETES|POD)_[A-Z_]+", spec.variable)


def test_a_refusal_names_the_field_the_origin_and_the_fix() -> None:
    assert refused(flags={"router.router_temperature": "-1"}) == (
        "--router-temperature (router.router_temperature): must be ≥ 0, not -1.0"
    )
    assert refused(environ={"DYN_HTTP_PORT": "many"}) == (
        "DYN_HTTP_PORT (frontend.http_port): must be a whole number, not 'many'"
    )
    assert refused(environ={"DYN_ROUTER_MODE": "best"}) == (
        "DYN_ROUTER_MODE (router.router_mode): must be 'kv', 'round-robin' or 'random', not 'best'"
    )
    assert refused(flags={"planes.listen_host": "a..b"}) == (
        "--listen-host (planes.listen_host): must be a host's name or address, with 1 to 63 characters "
        "between dots, not 'a..b'"
    )
    document = parse_document("version: 1\nrouter:\n  kv_events: 1\n  temperature: 2\n", "f.yaml")
    assert refused(document=document).split("\n") == [
        "f.yaml:3: router.kv_events: must be true or false, not 1",
        "f.yaml:4: router.temperature: unknown key (did you mean router_temperature?)",
    ]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize(
    "spec", [spec for spec in SETTINGS if spec.kind is SettingKind.NUMBER], ids=lambda s: s.name
)
def test_non_finite_numbers_are_refused(spec: object, text: str) -> None:
    key = spec.yaml_key  # type: ignore[attr-defined]
    assert "must be" in refused(flags={key: text})


@given(value=st.floats() | st.integers() | st.text(max_size=4) | st.none() | st.booleans())
def test_fraction_setting_takes_values_from_0_to_1_and_refuses_others(value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    legal = value is None or (number and 0 <= value <= 1)  # type: ignore[operator]
    if legal:
        assert KvRouterConfig(active_decode_blocks_threshold=value).active_decode_blocks_threshold == value  # type: ignore[arg-type]
        return
    with pytest.raises(ValidationError):
        KvRouterConfig(active_decode_blocks_threshold=value)  # type: ignore[arg-type]


def test_number_refuses_a_switch_and_a_switch_takes_only_known_words() -> None:
    with pytest.raises(ValidationError):
        KvRouterConfig(retries_max=True)
    with pytest.raises(ValidationError):
        KvRouterConfig(kv_events="true")  # type: ignore[arg-type]
    assert [parse_switch(word) for word in ("on", " Yes", "1", "TRUE", "off", "no", "0", "false")] == [
        *[True] * 4,
        *[False] * 4,
    ]
    with pytest.raises(ValueError, match="true or false"):
        parse_switch("ja")


def test_blank_variables_count_as_unset() -> None:
    assert (
        load_settings(flags={}, environ={"DYN_ROUTER_MODE": " ", "DYN_HTTP_PORT": ""}).settings == Settings()
    )


def test_engine_key_variable_is_a_known_variable() -> None:
    assert load_settings(flags={}, environ={"KVROUTER_ENGINE_API_KEY": "k"}) == (Settings(), ())


def test_unknown_kvrouter_variables_are_refused_and_near_misses_warned_of() -> None:
    assert refused(environ={"KVROUTER_RETRY_MAX": "1"}) == (
        "KVROUTER_RETRY_MAX: unknown variable (did you mean KVROUTER_RETRIES_MAX?)"
    )
    loaded = load_settings(
        flags={},
        environ={
            "DYN_ROUTER_TEMPRATURE": "1",
            "DYN_ADMIN_TOKEN": "1",
            "DYN_OF_SOMEBODY_ELSE": "1",
            "DYN_TOPOLOGY_ENABLED": "true",
            "DYN_KV_TRANSFER_DOMAIN": "zone",
            "DYN_KV_TRANSFER_ENFORCEMENT": "required",
            "KVROUTER_FLEET": "f.yaml",
        },
    )
    assert loaded.warnings == (
        "DYN_ADMIN_TOKEN is not read (did you mean KVROUTER_ADMIN_TOKEN?)",
        "DYN_ROUTER_TEMPRATURE is not read (did you mean DYN_ROUTER_TEMPERATURE?)",
    )
    assert loaded.settings == Settings()


def test_water_marks_out_of_order_are_refused_whatever_their_source() -> None:
    assert refused(flags={"frontend.write_high_water_bytes": "7"}).startswith(
        "--write-high-water-bytes (frontend.write_high_water_bytes): must be > frontend.write_low_water_bytes"
    )
    assert refused(environ={"KVROUTER_WRITE_LOW_WATER_BYTES": "70000"}).startswith(
        "KVROUTER_WRITE_LOW_WATER_BYTES (frontend.write_low_water_bytes): must be <"
    )


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        ({"DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY": "fallback"}, "without router.kv_transfer_topology_level"),
        ({"KVROUTER_ADMISSION_QUEUE_MAX": "5"}, "router.admission_queue_max has no effect"),
        ({"KVROUTER_ADMISSION_WAIT_S": "5"}, "router.admission_wait_s has no effect"),
        ({"DYN_HTTP_HOST": "0.0.0.0"}, "the admin routes are open"),
    ],
)
def test_settings_without_their_intended_effect_are_warned_of(environ: dict[str, str], warning: str) -> None:
    (line,) = load_settings(flags={}, environ=environ).warnings
    assert warning in line


def test_the_admin_token_has_no_flag_and_is_never_printed() -> None:
    settings = load_settings(flags={}, environ={"KVROUTER_ADMIN_TOKEN": "open-sesame"}).settings
    assert settings.frontend.admin_token is not None
    assert settings.frontend.admin_token.get_secret_value() == "open-sesame"
    assert "sesame" not in repr(settings)
    (spec,) = (spec for spec in SETTINGS if spec.name == "admin_token")
    assert spec.flag is None


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        Settings().router.router_mode = RouterMode.RANDOM
    assert math.isclose(Settings().router.router_prune_target_ratio, 0.8)


def test_duplicate_keys_unsafe_yaml_and_non_mappings_are_refused(tmp_path: Path) -> None:
    for text, message in (
        (
            "a: 1\nb: {c: 1, c: 2}\na: 2",
            "f.yaml:2: b.c: given again on line 2\nf.yaml:1: a: given again on line 3",
        ),
        ("a: [1", "f.yaml:1: not YAML"),
        ("a: &x [*x]", "f.yaml: not YAML"),
        ("- 1", "f.yaml:1: must be a mapping"),
        ("", "f.yaml:1: must be a mapping"),
        ("a: 1\n---\nb: 1", "f.yaml:2: not YAML"),
        ("a: 1\nb: \x01", r"f.yaml:2: not YAML: '\x01': special characters are not allowed"),
        ("a: !!bool maybe", "f.yaml: not YAML: a value does not fit its tag"),
        ("a: !!python/object:os.system x", "f.yaml:1: not YAML"),
        (
            "\n".join(
                f"{name}: &{name} [{', '.join([item] * 10)}]"
                for name, item in [("a", "x"), ("b", "*a"), ("c", "*b"), ("d", "*c"), ("e", "*d")]
            ),
            "more than 100000 keys",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_document(text, "f.yaml")
        assert message in caught.value.message
    assert parse_document("a: 25e9\nb: 1.5e-3\nc: 0.5", "f.yaml").content == {
        "a": 25e9,
        "b": 0.0015,
        "c": 0.5,
    }


def test_a_program_may_give_paths_as_paths() -> None:
    planes = {"discovery": "file", "discovery_dir": Path("/run/workers")}
    settings = Settings.model_validate({"planes": planes, "router": {"router_learned_file": Path("speeds")}})
    assert (settings.planes.discovery_dir, settings.router.router_learned_file) == ("/run/workers", "speeds")
