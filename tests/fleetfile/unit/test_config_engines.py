"""Engines that run already, in the fleet file: what a line may say, and what contradicts itself."""

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec, MockEngineSpec, url_mistake
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_strict import strict_problems
from kvrouter.settings.problems import parse_document

GOOD = """\
version: 1
models: [{name: org/tiny:1, tokenizer: mock}]
workers:
  - {name: a, engine: {kind: vllm, url: "http://a:8000"}}
  - {name: b, engine: {kind: vllm, urls: ["http://b:8000", "https://c/"]}}
"""
A = 'url: "http://a:8000"'
B = 'urls: ["http://b:8000", "https://c/"]'


def load(text: str) -> FleetFile:
    return load_fleet(parse_document(text, "fleet.yaml")).fleet


def test_omitted_engine_facts_are_unknown() -> None:
    fleet = load(GOOD)
    (model,) = fleet.models
    assert (model.block_size, model.context_length) == (None, None)
    assert [group.n_workers for group in fleet.workers] == [1, 2]
    engines = [group.engine for group in fleet.workers]
    assert [each.all_urls for each in engines if isinstance(each, AttachedEngineSpec)] == [
        ("http://a:8000",),
        ("http://b:8000", "https://c"),
    ]


def test_an_engine_without_a_kind_is_a_mock_engine() -> None:
    fleet = load(
        "version: 1\nmodels: [{name: m}]\nworkers: [{name: a, engine: {max_num_seqs: 3}}, {name: b}]\n"
    )
    assert [group.engine for group in fleet.workers] == [MockEngineSpec(max_num_seqs=3), MockEngineSpec()]


def test_a_model_without_a_name_is_mock_or_the_one_its_engines_name() -> None:
    fleet = load("version: 1\nmodels: [{}]\nworkers: [{name: a}]\n")
    assert fleet.stated_name(fleet.models[0]) == "mock"
    fleet = load(f"version: 1\nmodels: [{{}}]\nworkers: [{{name: a, engine: {{kind: vllm, {A}}}}}]\n")
    assert fleet.stated_name(fleet.models[0]) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (A, "", "4: workers[0].engine.url: is required: where the engine's server is, as http://HOST:PORT"),
        (A, f"{A}, {B}", "4: workers[0].engine.urls: contradicts url: give one of the two"),
        (A, 'url: "a:8000"', "4: workers[0].engine.url: must be http://HOST:PORT, or https, not 'a:8000'"),
        (A, 'url: "http://a/v1/"', "4: workers[0].engine.url: must be the server's own URL, without /v1"),
        (A, 'url: "http://a:x"', "4: workers[0].engine.url: must be http://HOST:PORT, or https, not 'http://a:x'"),
        (A, 'url: "http://-a:8000"',
         "4: workers[0].engine.url: must be http://HOST:PORT, or https, with a host's name or address, not"),
        (A, 'url: "http://a..b:8000"',
         "4: workers[0].engine.url: must be http://HOST:PORT, or https, with a host's name or address, not"),
        (A, 'url: "http://${HOST}:8000"',
         "4: workers[0].engine.url: must have the host or port itself where it has the placeholder ${HOST}, "
         "because nothing here fills in variables, not 'http://${HOST}:8000'"),
        (A, 'url: "http://<your-host>:8000"', "4: workers[0].engine.url: must have the host or port itself "
         "where it has the placeholder <your-host>, not 'http://<your-host>:8000'"),
        (B, 'urls: ["http://b:8000", "http://c:PORT"]',
         "5: workers[1].engine.urls[1]: must have the host or port itself where it has the placeholder"),
        (A, 'url: "http://a:8000?x=1"',
         "4: workers[0].engine.url: must be the server's own URL, without ? and what follows it"),
        (A, 'url: "http://a:8000/#x"',
         "4: workers[0].engine.url: must be the server's own URL, without # and what follows it"),
        (A, f"{A}, kv_events_endpoint: 'tcp://$HOST:5557'",
         "4: workers[0].engine.kv_events_endpoint: must have the host or port itself where it has the "
         "placeholder $HOST"),
        (A, 'url: "http://me:secret@a:8000"',
         "4: workers[0].engine.url: must name no user: a key goes into KVROUTER_ENGINE_API_KEY, "
         "not 'http://…@a:8000'"),
        (A, 'url: "http://me:se@c/r et@a:8000"',
         "4: workers[0].engine.url: must name no user: a key goes into KVROUTER_ENGINE_API_KEY, "
         "not 'http://…@a:8000'"),
        (A, 'url: "http://b:8000/"',
         "5: workers[1].engine.urls[0]: must be unique: http://b:8000 is workers[0].engine.url"),
        (B, "urls: []", "5: workers[1].engine.urls: must not be empty"),
        (A, f"{A}, max_num_seqs: 1", "4: workers[0].engine.max_num_seqs: unknown key"),
        (A, f"{A}, api_key: s", "4: workers[0].engine.api_key: unknown key"),
        (A, f"{A}, kv_event: false", "4: workers[0].engine.kv_event: unknown key (did you mean kv_events?)"),
        (A, f"{A}, kv_events: no_", "4: workers[0].engine.kv_events: must be true or false, not 'no_'"),
        (A, f"{A}, kv_events_endpoint: 'tcp://*:5557'",
         "4: workers[0].engine.kv_events_endpoint: must be tcp://HOST:PORT, not 'tcp://*:5557'"),
        (A, f"{A}, kv_events_replay_endpoint: 'tcp://a:5557'",
         "4: workers[0].engine.kv_events_replay_endpoint: only together with kv_events_endpoint"),
        (A, f"{A}, kv_events: false, kv_events_endpoint: 'tcp://a:5557'",
         "4: workers[0].engine.kv_events_endpoint: contradicts kv_events: false"),
        (B, f"{B}, kv_events_endpoint: 'tcp://a:5557'",
         "5: workers[1].engine.kv_events_endpoint: is one engine's, and urls are several: "
         "leave it out, or make a group of each"),
        ("name: a,", "name: a, replicas: 2,",
         "4: workers[0].replicas: must be the number of engines (1) or be left out, not 2"),
        ("name: a, engine: {kind: vllm", "name: a, role: prefill, engine: {kind: sglang",
         "5: workers[1].engine.kind: must be 'sglang', not 'vllm': 'a' prefills for 'org/tiny:1', "
         "and KV goes between engines of one kind"),
        ("kind: vllm, url: ", "kind: vlm, url: ",
         "4: workers[0].engine.kind: must be 'mock', 'vllm', 'sglang' or 'trtllm', not 'vlm'"),
        ("engine: {kind: vllm, url", "engine: {url", "4: workers[0].engine.url: unknown key"),
        ("org/tiny:1", "tiny/", "2: models[0].name: must be letters, digits and ._/:@+-"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load(GOOD.replace(old, new, 1))
    assert caught.value.message.split("\n")[0].startswith(f"fleet.yaml:{message}")


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        (A, f"{A}, kv_events: false", "group 'a' publishes no KV events"),
        ('{kind: vllm, url: "http://a:8000"}', "{}", "has mock engines and others"),
    ],
)
def test_likely_unintended_engine_settings_are_warned_of(old: str, new: str, warning: str) -> None:
    assert load_fleet(parse_document(GOOD, "fleet.yaml")).warnings == ()
    (reported,) = load_fleet(parse_document(GOOD.replace(old, new), "fleet.yaml")).warnings
    assert warning in reported


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.7:8000",
        "https://[fd00::7]:8000",
        "http://vllm_0.internal.:8000/gateway/a",
        "http://bücher:8000",
        "http://localhost",
    ],
)
def test_urls_of_engines_that_can_be_are_good(url: str) -> None:
    assert url_mistake(url) is None


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("HOST", True),
        ("your-host", True),
        ("YOUR_ENGINE", True),
        ("TODO", True),
        ("gpu.example.com", True),
        ("example.org", True),
        ("vllm.example", True),
        ("host-7", False),
        ("myexample.com", False),
        ("10.0.0.7", False),
        ("todo-service.prod", False),
    ],
)
def test_strict_check_names_hosts_that_are_placeholders(host: str, is_one: bool) -> None:
    fleet = load(GOOD.replace("http://a:8000", f"http://{host}:8000"))
    found = [problem for problem in strict_problems(fleet) if "placeholder" in problem.must]
    assert [problem.path for problem in found] == ([("workers", 0, "engine", "url")] if is_one else [])
