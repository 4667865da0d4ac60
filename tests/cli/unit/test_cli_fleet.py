"""``kvrouter fleet``: the file that is written, what a file means, and each fault that a check names."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from click.testing import CliRunner

from kvrouter.cli import main
from kvrouter.cli.commands import kvrouter
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_checks import default_fleet_path, load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import read_document
from kvrouter.settings.tree import TokenizeFallback
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.scripted_engine import SGLANG_PAGES, scripted_engine

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(path: str = "fleet.yaml") -> FleetFile:
    return load_fleet(read_document(Path(path))).fleet


ENGINES = ("--engine", "vllm", "--model", "org/model")


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ((), [("worker", Role.BOTH, 4, {})]),
        (
            ("--zone", "a", "--zone", "no"),
            [
                ("prefill-a", Role.PREFILL, 1, {"zone": "a"}),
                ("decode-a", Role.DECODE, 2, {"zone": "a"}),
                ("prefill-no", Role.PREFILL, 1, {"zone": "no"}),
                ("decode-no", Role.DECODE, 2, {"zone": "no"}),
            ],
        ),
        (
            (*ENGINES, "--url", "http://h:1", "--url", "http://h:2"),
            [("worker", Role.BOTH, 2, {})],
        ),
        (
            (*ENGINES, *("--url", "prefill@a=http://h:1"), *("--url", "decode@a=http://h:2/x=1")),
            [("prefill-a", Role.PREFILL, 1, {"zone": "a"}), ("decode-a", Role.DECODE, 1, {"zone": "a"})],
        ),
        ((*ENGINES, "--url", "@b=http://h:1"), [("worker-b", Role.BOTH, 1, {"zone": "b"})]),
    ],
)
def test_fleet_init_file_has_comments_and_passes_the_strict_check(
    flags: tuple[str, ...],
    groups: list[tuple[str, Role, int, dict[str, str]]],
    folder: Path,
    capsys: Captured,
) -> None:
    assert main(["fleet", "init", *flags]) == 0
    assert "fleet.yaml: written: " in capsys.readouterr().out
    fleet = written()
    assert [(each.name, each.role, each.n_workers, dict(each.domains)) for each in fleet.workers] == groups
    assert (fleet.kv_transfer is not None) == any(role is Role.PREFILL for _, role, _, _ in groups)
    assert (folder / "fleet.yaml").read_text().count("#") > 5
    assert main(["fleet", "check", "--strict", "fleet.yaml"]) == 0


def test_existing_fleet_file_is_replaced_only_with_force(folder: Path, capsys: Captured) -> None:
    path = folder / "mine.yaml"
    path.write_text("mine")
    assert main(["fleet", "init", "mine.yaml"]) == 2
    assert "mine.yaml: is there already: give another name, or --force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["fleet", "init", "mine.yaml", "--force"]) == 0
    assert written("mine.yaml").models[0].name == "mock"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--engine", "vllm", "--model", "m"), "--url: is required, once for each vllm server"),
        (("--url", "http://h:1"), "--url: mock engines have none"),
        ((*ENGINES, "--zone", "a", "--url", "http://h:1"), "--zone: is of mock engines"),
        ((*ENGINES, "--url", "prefil=http://h:1"), "--url: the role must be one of"),
        ((*ENGINES, "--url", "prefill@=http://h:1"), "--url: must be ROLE@ZONE=URL"),
        ((*ENGINES, "--url", "h:1"), "--url: must be http://HOST:PORT"),
        ((*ENGINES, "--url", "http://user:secret@h:1"), "--url: must name no user"),
        ((*ENGINES, "--url", "prefill=http://h:1"), "no worker decodes"),
        ((*ENGINES, "--url", "http://h:1", "--url", "http://h:1/"), "--url: http://h:1 is given twice"),
        (("no/such/fleet.yaml",), "is no folder"),
    ],
)
def test_invalid_fleet_init_flags_write_no_file(
    flags: tuple[str, ...], line: str, folder: Path, capsys: Captured
) -> None:
    assert main(["fleet", "init", *flags]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert "secret" not in err
    assert not list(folder.iterdir())


def init(*arguments: str) -> str:
    """Run ``kvrouter fleet init`` for vLLM engines, and return what it writes to standard error."""
    done = CliRunner().invoke(kvrouter, ["fleet", "init", "--engine", "vllm", "--force", *arguments])
    assert done.exit_code == 0, done.output
    return done.stderr


async def test_fleet_init_asks_engines_for_their_model(folder: Path) -> None:
    async with scripted_engine() as one, scripted_engine() as two:
        lines = await asyncio.to_thread(init, "--url", one.url, "--url", f"decode@b={two.url}")
        assert f"{one.url}: vllm 0.32.0 serves tiny: blocks of 32 tokens, KV events\n" in lines
        fleet = written()
        assert [(each.name, each.n_workers) for each in fleet.workers] == [("worker", 1), ("decode-b", 1)]
        assert [model.name for model in fleet.models] == ["tiny"]
        assert fleet.frontend.tokenize_fallback is TokenizeFallback.ENGINE
        asked = one.asked["/v1/models"]
        await asyncio.to_thread(init, "--model", "mine", "--url", one.url)
        assert (one.asked["/v1/models"], written().models[0].name) == (asked, "mine")


async def test_fleet_init_writes_each_of_two_models_with_its_engines(folder: Path) -> None:
    async with scripted_engine() as one, scripted_engine() as two:
        two.replace("/v1/models", '"tiny"', '"large"')
        await asyncio.to_thread(init, "--url", one.url, "--url", two.url)
    fleet = written()
    groups = [(each.name, each.model, each.n_workers) for each in fleet.workers]
    assert groups == [("worker-1", "tiny", 1), ("worker-2", "large", 1)]


async def test_fleet_init_says_which_engine_does_not_answer_and_leaves_its_model_to_be_asked(
    folder: Path,
) -> None:
    async with scripted_engine() as one:
        pass
    lines = await asyncio.to_thread(init, "--url", one.url)
    assert (
        f"{one.url}: does not answer now (connection refused, nothing listens at its host and port" in lines
    )
    assert "it is asked when the fleet is run" in lines
    assert written().models[0].name is None
    assert main(["fleet", "check", "--strict", "fleet.yaml"]) == 0


async def test_fleet_init_refuses_a_server_of_another_kind(folder: Path) -> None:
    async with scripted_engine(SGLANG_PAGES) as engine:
        command = ["fleet", "init", "--engine", "vllm", "--url", engine.url]
        assert await asyncio.to_thread(main, command) == 2
    assert not (folder / "fleet.yaml").exists()


FLEET = """\
version: 1
models: [{name: m}]
topology:
  levels: [zone, rack]
  links:
    pairs:
      - {level: rack, between: [r1, r2], latency_s: 0.001, bandwidth_bytes_per_s: 1e9}
kv_transfer: {domain: zone, enforcement: required}
workers:
  - {name: p, role: prefill, domains: {zone: a, rack: r1}, engine: {kind: vllm, url: "http://h:1"}}
  - {name: d, role: decode, domains: {zone: a, rack: r2}, engine: {kind: vllm, url: "http://h:2"}}
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (", rack: r1", "", "f.yaml:10: workers[0].domains: has no rack, which other groups have"),
        ("rack]", "rack, host]", "f.yaml:4: topology.levels[2]: no worker has a host"),
        (
            "between: [r1, r2]",
            "between: [r1, r9]",
            "f.yaml:7: topology.links.pairs[0].between[1]: no worker is in rack 'r9': there are r1, r2",
        ),
        (
            '"http://h:2"',
            '"http://H:1/"',
            "f.yaml:11: workers[1].engine.url: must be unique: http://H:1 is the address of "
            "workers[0].engine.url",
        ),
        (
            '"http://h:2"',
            '"http://h:2", kv_events_endpoint: "tcp://h:1"',
            "f.yaml:11: workers[1].engine.kv_events_endpoint: must be unique",
        ),
        ("role: decode, domains: {zone: a", "role: decode, domains: {zone: b", "f.yaml: zone=a has prefill"),
        (
            'url: "http://h:2"',
            'url: "http://h:2", kv_events: false',
            "f.yaml: group 'd' publishes no KV events",
        ),
        (
            "enforcement: required}",
            "enforcement: required, preferred_weight: 0.5}",
            "f.yaml: kv_transfer.preferred_weight has no effect under 'required'",
        ),
        ("version: 1", "version: 1\nrouter: {admission_wait_s: 1}", "f.yaml: router.admission_wait_s has no"),
    ],
)
def test_strict_check_names_valid_but_likely_unintended_settings(
    old: str, new: str, line: str, folder: Path, capsys: Captured
) -> None:
    (folder / "f.yaml").write_text(FLEET)
    assert main(["fleet", "check", "--strict", "f.yaml"]) == 0
    (folder / "f.yaml").write_text(FLEET.replace(old, new, 1))
    capsys.readouterr()
    assert main(["fleet", "check", "f.yaml"]) == 0
    assert main(["fleet", "check", "--strict", "f.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out.count("good") == 1
    assert f"kvrouter: {line}" in err


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
def test_a_group_without_kv_events_is_as_it_should_be_where_the_router_uses_none(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    silent = FLEET.replace('"http://h:2"', '"http://h:2", kv_events: false', 1)
    if how == "variable":
        monkeypatch.setenv("DYN_ROUTER_USE_KV_EVENTS", "false")
    if how == "file":
        silent += "router: {kv_events: false}\n"
    (folder / "f.yaml").write_text(silent)
    flags = ["--no-kv-events"] if how == "flag" else []
    assert main(["fleet", "check", "--strict", *flags, "f.yaml"]) == 0
    assert "KV events" not in capsys.readouterr().err


def test_engines_behind_one_gateway_are_not_one_engine(folder: Path, capsys: Captured) -> None:
    fleet = FLEET.replace("http://h:1", "http://gw:1/a").replace("http://h:2", "http://gw:1/b")
    (folder / "f.yaml").write_text(fleet)
    assert main(["fleet", "check", "--strict", "f.yaml"]) == 0


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_invalid_port_of_an_engine_endpoint_is_refused(port: str, folder: Path, capsys: Captured) -> None:
    old = '"http://h:2"'
    (folder / "f.yaml").write_text(FLEET.replace(old, f'{old}, kv_events_endpoint: "tcp://h:{port}"', 1))
    assert main(["fleet", "check", "--strict", "f.yaml"]) == 2
    assert "kv_events_endpoint: must be tcp://HOST:PORT" in capsys.readouterr().err


def test_a_check_as_json_has_each_mistake_with_its_place(folder: Path, capsys: Captured) -> None:
    (folder / "f.yaml").write_text(FLEET.replace("name: m", "name: m, tokenizer: /no/where, block_size: 0"))
    assert main(["fleet", "check", "f.yaml", "--output", "json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"] is False
    assert [(each["line"], each["field"]) for each in found["mistakes"]] == [
        (2, "models[0].block_size"),
        (2, "models[0].tokenizer"),
    ]
    (folder / "f.yaml").write_text(FLEET)
    assert main(["fleet", "check", "f.yaml", "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"] == "2 workers for m, KV required on zone"


UNREADABLE = {
    "a folder without a tokenizer": ({}, "has no tokenizer.json here"),
    "another format that is broken": ({"tiktoken.model": "no base64"}, "tiktoken.model cannot be converted"),
    "a broken tokenizer.json": ({"tokenizer.json": "{"}, "is not a tokenizer"),
    "a template that does not compile": ({"chat_template.jinja": "{% if %}"}, "chats cannot be read here: "),
    "a template that fails": ({"chat_template.jinja": "{{ nowhere.at_all }}"}, "UndefinedError"),
}


@pytest.mark.parametrize("what", sorted(UNREADABLE))
def test_unreadable_tokenizer_is_a_warning_for_engines_and_a_mistake_for_mocks(
    what: str, folder: Path
) -> None:
    files, said = UNREADABLE[what]
    (folder / "model").mkdir()
    if "chat_template.jinja" in files:
        copytree(MOCK_FOLDER, folder / "model", dirs_exist_ok=True)
    for name, content in files.items():
        (folder / "model" / name).write_text(content)
    text = "version: 1\nmodels: [{name: m, tokenizer: ./model}]\nworkers: [{name: a%s}]\n"
    (folder / "f.yaml").write_text(text % ", engine: {kind: vllm, url: 'http://h:1'}")
    code, found = check("f.yaml")
    (warning,) = found["warnings"]
    assert (code, found["is_good"], found["mistakes"]) == (0, True, [])
    assert warning.startswith("models[0].tokenizer: ")
    assert said in warning
    assert warning.endswith("calls of 'm' are routed by load and text")
    assert check("f.yaml", "--strict")[0] == 2
    (folder / "f.yaml").write_text(text % "")
    code, found = check("f.yaml")
    if said == "UndefinedError":  # a mock engine's calls are refused by it one by one
        assert code == 0
        return
    assert (code, [each["field"] for each in found["mistakes"]]) == (2, ["models[0].tokenizer"])


def test_mock_tokenizer_for_real_engines_is_a_warning(folder: Path) -> None:
    text = "version: 1\nmodels: [{name: m, tokenizer: %s}]\n"
    text += "workers: [{name: a, engine: {kind: vllm, url: 'http://h:1'}}]\n"
    (folder / "f.yaml").write_text(text % "mock")
    code, found = check("f.yaml")
    assert (code, len(found["warnings"])) == (0, 1)
    assert "tokenizer mock are not the engine's" in found["warnings"][0]
    for said in ("engine", str(MOCK_FOLDER)):
        (folder / "f.yaml").write_text(text % said)
        assert check("f.yaml")[1]["warnings"] == []


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(kvrouter, ["fleet", "check", *arguments, "--output", "json"])
    return done.exit_code, json.loads(done.stdout)


async def test_fleet_check_connect_compares_engines_with_the_file(folder: Path) -> None:
    async with scripted_engine() as one, scripted_engine() as two:
        text = "version: 1\nmodels:\n  - {name: tiny}\nworkers:\n" + "".join(
            f'  - {{name: {name}, engine: {{kind: vllm, url: "{engine.url}"}}}}\n'
            for name, engine in (("a", one), ("b", two))
        )
        path = folder / "f.yaml"
        path.write_text(text)
        code, found = await asyncio.to_thread(check, "f.yaml", "--connect")
        assert (code, found["mistakes"]) == (0, [])
        path.write_text(text.replace("tiny", "tiny, block_size: 64"))
        code, found = await asyncio.to_thread(check, "f.yaml", "--connect")
        assert code == 2
        assert [(each["line"], each["field"]) for each in found["mistakes"]] == [
            (5, "workers[0].engine.url"),
            (6, "workers[1].engine.url"),
        ]
        assert "models[0].block_size: the engine's blocks have 32 tokens" in found["mistakes"][0]["message"]
    path.write_text(text)
    code, found = await asyncio.to_thread(check, "f.yaml", "--connect")
    assert code == 1
    assert [each["is_unreachable"] for each in found["mistakes"]] == [True, True]


async def test_engine_key_of_the_file_is_used_and_a_missing_one_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_engine() as one, scripted_engine() as two:
        (folder / "f.yaml").write_text(
            "version: 1\nmodels: [{name: tiny}]\nworkers:\n"
            f"  - {{name: a, engine: {{kind: vllm, url: '{one.url}', api_key_env: KEY_OF_A}}}}\n"
            f"  - {{name: b, engine: {{kind: vllm, url: '{two.url}',\n"
            f"      api_key_file: {folder}/absent}}}}\n"
        )
        monkeypatch.setenv("KEY_OF_A", "of a\n")
        assert (await asyncio.to_thread(check, "f.yaml"))[0] == 0, "another host may have the key"
        code, found = await asyncio.to_thread(check, "f.yaml", "--connect")
        assert {each["Authorization"] for each in one.question_headers} == {"Bearer of a"}
        assert not two.question_headers
    assert code == 2
    (mistake,) = found["mistakes"]
    assert (mistake["line"], mistake["field"]) == (6, "workers[1].engine.api_key_file")
    assert mistake["message"] == f"{folder}/absent: is not there"


async def test_engines_of_one_model_whose_blocks_differ_are_named(folder: Path) -> None:
    async with scripted_engine() as one, scripted_engine() as two, scripted_engine() as three:
        three.replace("/metrics", 'block_size="32"', 'block_size="16"')
        urls = ", ".join(f'"{engine.url}"' for engine in (one, two, three))
        (folder / "f.yaml").write_text(
            "version: 1\nmodels: [{name: tiny}]\nworkers:\n"
            f"  - {{name: a, engine: {{kind: vllm, urls: [{urls}]}}}}\n"
        )
        code, found = await asyncio.to_thread(check, "f.yaml", "--connect")
    assert code == 2
    (mistake,) = found["mistakes"]
    assert mistake["field"] == "workers[0].engine.urls[2]"
    assert "its blocks have 16 tokens, and others of 'tiny' have 32" in mistake["message"]


def shown(*arguments: str, environ: Mapping[str, str] | None = None) -> str:
    done = CliRunner().invoke(kvrouter, ["fleet", "show", *arguments], env=environ)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_fleet_show_lists_models_groups_and_links_of_a_file() -> None:
    path = str(default_fleet_path())
    lines = [line.split() for line in shown(path).splitlines()]
    assert lines[0] == [f"{path}:", "6", "workers,", "KV", "required", "on", "zone"]
    assert ["mock", "mock", "64", "32,768", "6"] in lines
    assert [
        "decode-a",
        "decode",
        "2",
        "2–3",
        "zone=a",
        "mock",
        "1",
        "1,048,576",
        "required",
        "on",
        "zone",
    ] in lines
    assert ["zone", "b", "1", "2", "0"] in lines
    fleet = json.loads(shown(path, "--output", "json"))
    assert fleet["groups"][3]["worker_ids"] == [5, 6]
    assert fleet["links"][0] == {
        "link": "within a zone",
        "latency_s": 0.0005,
        "bandwidth_bytes_per_s": 12.5e9,
        "price_per_gb": None,
    }


def test_fleet_show_marks_values_asked_of_engines_and_lists_settings(folder: Path) -> None:
    text = FLEET + "router: {router_mode: random}\nfrontend: {admin_token: hidden-word}\n"
    (folder / "f.yaml").write_text(text)
    printed = shown("f.yaml")
    lines = [line.split() for line in printed.splitlines()]
    assert ["m", "asked", "asked", "asked", "2"] in lines
    assert ["router.router_mode", "random"] in lines
    assert "hidden-word" not in printed + shown("f.yaml", "-o", "json")


async def test_fleet_show_groups_equal_workers_of_a_running_router() -> None:
    async with mock_server(zoned_fleet()) as here:
        printed = await asyncio.to_thread(shown, "--url", here.url)
        fleet = json.loads(await asyncio.to_thread(shown, "--url", here.url, "--output", "json"))
        assert printed.splitlines()[0] == f"{here.url}: 6 workers"
    assert sum(len(group["worker_ids"]) for group in fleet["groups"]) == 6
    assert {(place["value"], place["prefill"], place["decode"]) for place in fleet["places"]} >= {("a", 1, 2)}
    assert fleet["models"][0]["block_size"] > 0
    assert all(group["kv_tokens"] for group in fleet["groups"])


def test_fleet_show_takes_either_a_file_or_a_url(capsys: Captured) -> None:
    assert main(["fleet", "show", "f.yaml", "--url", "http://h:1"]) == 2
    assert "give FILE, or --url URL, and not both" in capsys.readouterr().err
    assert main(["fleet", "show", "--url", "http://127.0.0.1:1"]) == 1


@pytest.mark.parametrize("command", ["show", "check"])
def test_fleet_file_of_the_current_folder_is_the_default(
    command: str, folder: Path, capsys: Captured
) -> None:
    assert main(["fleet", command]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvrouter: no fleet.yaml in this folder: give FILE")
    assert "kvrouter fleet init" in said
    assert main(["fleet", "init"]) == 0
    capsys.readouterr()
    assert main(["fleet", command]) == 0
    shown = capsys.readouterr().out
    assert main(["fleet", command, "fleet.yaml"]) == 0
    assert capsys.readouterr().out == shown != ""
