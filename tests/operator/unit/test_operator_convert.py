"""``kvrouter operator convert``: Dynamo's manifests as kvrouter's, and nothing is lost without a word."""

import copy
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.cli import main
from kvrouter.operator.admission.validate import validate
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.convert import Conversion, convert
from kvrouter.operator.convert.convert import OF_STORED_OBJECTS
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.settings.problems import Path as Place
from kvrouter.settings.problems import read_documents

ROOT = Path(__file__).parents[3]
DYNAMO = sorted((ROOT / "tests" / "data" / "manifests" / "dynamo").glob("*.yaml"))
OURS = sorted((ROOT / "examples" / "kubernetes").rglob("*.yaml"))
V1ALPHA1 = "nvidia.com/v1alpha1"
WORKER = {"image": "example.com/engine:1"}


def converted(
    spec: dict[str, Any], version: str = V1ALPHA1
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The manifest; notes by their last field, lost or changed; problems."""
    document: dict[str, Any] = {
        "apiVersion": version,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "llm"},
        "spec": spec,
    }
    found = convert(document)
    notes = {
        str(note.path[-1]): f"{'lost' if note.is_lost else 'changed'}: {note.text}" for note in found.notes
    }
    problems = [f"{problem.path}: {problem.must}" for problem in found.problems]
    return dict(found.manifests[-1]) if found.manifests else {}, notes, problems


def service(**fields: Any) -> dict[str, Any]:
    """The only service of a v1alpha1 manifest, a worker."""
    return {
        "services": {"w": {"componentType": "worker", "extraPodSpec": {"mainContainer": WORKER}, **fields}}
    }


def of_worker(**fields: Any) -> dict[str, Any]:
    """What becomes of it."""
    manifest, _, problems = converted(service(**fields))
    assert problems == []
    component: dict[str, Any] = manifest["spec"]["components"][0]
    return component


@pytest.mark.parametrize("path", DYNAMO, ids=lambda path: path.stem)
def test_dynamo_manifests_convert_to_manifests_that_admission_accepts(path: Path) -> None:
    for document in read_documents(path):
        found = convert(dict(document.content))  # type: ignore[arg-type]
        assert found.problems == ()
        for manifest in found.manifests:
            if manifest["kind"] == "DynamoGraphDeployment":
                verdict = validate(manifest, None, ClusterInfo(), PlanDefaults(image="kvrouter"))
                assert [problem for problem in verdict.problems if "grove.io" not in problem.must] == []
                assert not [warning for warning in verdict.warnings if "no field" in warning.must]
                again = convert(manifest)
                assert again.manifests == (manifest,)
                assert {note.text for note in again.notes} <= {note.text for note in found.notes}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_kvrouter_manifests_are_converted_unchanged(path: Path) -> None:
    for document in read_documents(path):
        assert convert(dict(document.content)) == Conversion((dict(document.content),), ())  # type: ignore[arg-type]


def mappings(found: JsonValue, at: Place = ()) -> Iterator[Place]:
    """Where each mapping of a document is."""
    if isinstance(found, dict):
        yield at
        for key, value in found.items():
            yield from mappings(value, (*at, key))
    elif isinstance(found, list):
        for index, entry in enumerate(found):
            yield from mappings(entry, (*at, index))


DOCUMENTS = [dict(document.content) for path in DYNAMO for document in read_documents(path)]


@given(data=st.data())
def test_every_unconverted_field_is_named_in_a_note_or_problem(data: st.DataObject) -> None:
    """Wherever one more field stands, it is in the result, or a line names it or what is around it."""
    document: Any = copy.deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    place = data.draw(st.sampled_from([*mappings(document)]))
    assume("status" not in place and "scaleTargetRef" not in place and place != ("metadata",))
    around = document
    for part in place:
        around = around[part]
    assume(around.get("enabled") is not False)  # of what is switched off nothing counts
    around["surprise"] = "of-the-user"
    found = convert(document)
    if "of-the-user" in json.dumps(found.manifests):
        return
    named = [note.path for note in found.notes if note.is_lost or "left out" in note.text] + [
        problem.path for problem in found.problems
    ]
    at = (*place, "surprise")
    assert any(at[: len(path)] == path for path in named), f"{at} is named by none of {named}"


def parts(found: JsonValue, at: Place = ()) -> Iterator[Place]:
    """Where each value of a document is."""
    if at:
        yield at
    entries = (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    )
    for key, value in entries:
        yield from parts(value, (*at, key))


@given(data=st.data())
def test_every_unconverted_wrong_value_is_named_in_a_note_or_problem(data: st.DataObject) -> None:
    document: Any = copy.deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    place = data.draw(st.sampled_from([*parts(document)]))
    is_list = document["kind"] == "List" and len(place) == 1
    assume(not is_list and not {*place} & {"status", *OF_STORED_OBJECTS} and place[:2] != ("spec", "pvcs"))
    around = document
    for part in place[:-1]:
        around = around[part]
    around[place[-1]] = "of-the-user"
    found = convert(document)
    if "of-the-user" in json.dumps(found.manifests):
        return
    named = [note.path for note in found.notes] + [problem.path for problem in found.problems]
    near = [path for path in named if place[: len(path)] == path or path[: len(place)] == place]
    assert near, f"{place} is named by none of {named}"


JSON: st.SearchStrategy[JsonValue] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 99), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(data=st.data())
def test_any_document_gives_manifests_problems_or_notes(data: st.DataObject) -> None:
    """Wherever a value is another one, it is converted, or a problem names a place."""
    document: Any = copy.deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    place = data.draw(st.sampled_from([at for at in mappings(document) if at]))
    around = document
    for part in place[:-1]:
        around = around[part]
    around[place[-1]] = data.draw(JSON)
    found = convert(document)
    assert found.manifests or found.problems or found.notes


def test_component_type_follows_from_the_type_field_or_the_args() -> None:
    assert of_worker()["type"] == "worker"
    assert of_worker(subComponentType="decode")["type"] == "decode"
    for args, role in (
        (["--is-prefill-worker"], "prefill"),
        (["--disaggregation-mode", "decode"], "decode"),
        (["--disaggregation-mode=prefill"], "prefill"),
        (["--disaggregation-mode", "agg"], "worker"),
    ):
        command = {"command": ["python3", "-m", "dynamo.vllm"], "args": args}
        assert of_worker(extraPodSpec={"mainContainer": {**WORKER, **command}})["type"] == role
    stated = {
        "services": {
            "a": {"extraPodSpec": {"mainContainer": {"command": ["python3", "-m", "dynamo.frontend"]}}}
        }
    }
    manifest = converted(stated)[0]
    assert yaml.safe_load(yaml.safe_dump(manifest)) == manifest
    assert manifest["spec"]["components"][0]["type"] == "frontend"
    nothing: dict[str, Any]
    for nothing in ({"a": {}}, {"a": None}):
        (problem,) = converted({"services": nothing})[2]
        assert "is needed, one of frontend, prefill, decode, worker" in problem
    engine = {"image": "x", "command": ["python3", "-m", "dynamo.vllm"]}
    for kind in ("main", ""):
        services = {"a": {"componentType": kind, "extraPodSpec": {"mainContainer": engine}}}
        manifest = converted({"services": services})[0]
        assert yaml.safe_load(yaml.safe_dump(manifest))["spec"]["components"][0]["type"] == "worker"


def test_unregistered_engine_is_noted_as_lost_at_its_input_path() -> None:
    main = {"name": "main", "image": "x", "command": ["python3", "-m", "dynamo.vllm"]}
    spec = {"containers": [{"name": "log", "image": "log"}, main]}
    component = {"name": "w", "type": "worker", "podTemplate": {"spec": spec}}
    service = {"componentType": "worker", "extraPodSpec": {"mainContainer": main}}
    places = {
        ("services", "w", "extraPodSpec", "mainContainer"): {"services": {"w": service}},
        ("components", 0, "podTemplate", "spec", "containers", 1): {"components": [component]},
    }
    for place, stated in places.items():
        document: Any = {"kind": "DynamoGraphDeployment", "metadata": {"name": "llm"}, "spec": stated}
        found = convert({"apiVersion": "nvidia.com/v1beta1", **document})
        assert [note.path for note in found.notes if note.is_lost] == [("spec", *place)]


def test_note_that_an_engine_never_registers_has_its_v1alpha1_path() -> None:
    container = {"image": "my/vllm-runtime:1", "command": ["python3", "-m", "dynamo.vllm"]}
    content: dict[str, Any] = {
        "apiVersion": V1ALPHA1,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "llm"},
        "spec": service(extraPodSpec={"mainContainer": container}),
    }
    (at,) = (note.path for note in convert(content).notes if "never registers" in note.text)
    assert at == ("spec", "services", "w", "extraPodSpec", "mainContainer")


def test_service_resources_become_container_resources() -> None:
    resources = {
        "requests": {"cpu": "2", "gpu": "1"},
        "limits": {"gpu": "2", "gpuType": "gpu.intel.com/xe", "custom": {"rdma/ib": "1"}},
        "claims": [{"name": "gpus"}],
    }
    main = of_worker(resources=resources)["podTemplate"]["spec"]["containers"][0]
    assert main["resources"] == {
        "requests": {"cpu": "2", "nvidia.com/gpu": "1"},
        "limits": {"gpu.intel.com/xe": "2", "rdma/ib": "1"},
        "claims": [{"name": "gpus"}],
    }


@pytest.mark.parametrize(
    ("stated", "size"),
    [({}, "8Gi"), ({"sharedMemory": {"size": "2Gi"}}, "2Gi"), ({"sharedMemory": {"disabled": True}}, "0")],
)
def test_shared_memory_size_has_dynamos_default_and_settings(stated: dict[str, Any], size: str) -> None:
    assert of_worker(**stated)["sharedMemorySize"] == size


def frontend(
    *args: str, command: tuple[str, ...] = ("python3", "-m", "dynamo.frontend")
) -> tuple[Any, dict[str, str]]:
    """The container of a frontend that is given these words, and the notes."""
    container = {"image": "my/vllm-runtime:1", "command": [*command], "args": [*args]}
    services = {"f": {"componentType": "frontend", "extraPodSpec": {"mainContainer": container}}}
    manifest, notes, problems = converted({"services": services})
    assert problems == []
    template = manifest["spec"]["components"][0].get("podTemplate", {"spec": {"containers": [{}]}})
    return template["spec"]["containers"][0], notes


def test_frontend_keeps_flags_kvrouter_has_and_notes_the_lost_ones() -> None:
    kept = ("--router-mode", "kv", "--no-router-kv-events", "--router-temperature=0.5")
    assert frontend(*kept)[0]["args"] == ["frontend", *kept]
    assert frontend("--http-port", "9000")[0]["env"] == [{"name": "DYN_HTTP_PORT", "value": "9000"}]
    text = "cd /w && exec python3 -m dynamo.frontend --router-mode kv --http-port ${PORT} 2>&1 | tee log"
    container, notes = frontend(text, command=("/bin/sh", "-c"))
    assert container == {"name": "main", "args": ["frontend", "--router-mode", "kv"]}
    assert notes["args"] == "lost: --http-port ${PORT}: must be a whole number, not '${PORT}'"
    for words in (("--router-mode", "direct"), ("--kserve-grpc-server",), ("--router-temperature", "hot")):
        container, notes = frontend(*words)
        assert container == {}
        assert notes["args"].startswith(f"lost: {' '.join(words)}: ")


def test_convert_command_writes_manifests_and_reports_lost_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, lossy = tmp_path / "clean.yaml", tmp_path / "lossy.yaml"
    document = {"apiVersion": V1ALPHA1, "kind": "DynamoGraphDeployment", "metadata": {"name": "llm"}}
    clean.write_text(yaml.safe_dump({**document, "spec": service(replicas=2)}))
    assert main(["operator", "convert", str(clean)]) == 0
    (written,) = yaml.safe_load_all(capsys.readouterr().out)
    assert written["spec"]["components"][0]["replicas"] == 2
    lossy.write_text(
        "---\n"
        + clean.read_text()
        + "---\n"
        + yaml.safe_dump({**document, "spec": service(ingress={"enabled": True})})
    )
    assert main(["operator", "convert", str(lossy)]) == 1
    both = capsys.readouterr()
    assert len([*yaml.safe_load_all(both.out)]) == 2
    line = next(line for line in both.err.splitlines() if ": lost: " in line)
    assert line.startswith(f"{lossy}:")
    assert ": document 2: spec.services.w.ingress: lost: write an Ingress" in line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(clean.read_bytes())))
    assert main(["operator", "convert", "-"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no document"),
        ("a: [", ":1: not YAML"),
        ("- a\n", ":1: must be a mapping"),
        ("kind: X\n", "apiVersion: is needed"),
        (
            "apiVersion: nvidia.com/v9\nkind: DynamoGraphDeployment\n",
            "apiVersion: must be nvidia.com/v1alpha1 or",
        ),
        (
            "apiVersion: nvidia.com/v1beta1\nkind: DynamoGraphDeployment\nmetadata: {name: a}\n",
            "spec: is needed",
        ),
        (
            "apiVersion: nvidia.com/v1beta1\nkind: DynamoGraphDeployment\nmetadata: {name: a}\nspec: {}\n",
            "no services",
        ),
        (
            "apiVersion: v1\nkind: ConfigMap\n---\n"
            "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\n"
            "metadata: {name: a}\nspec: {services: {w: {componentType: worker, replicas: many}}}\n",
            ":7: document 2: spec.services.w.replicas: must be a whole number",
        ),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {x: .nan}\n", "data.x: must be a value that JSON has"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {1: x}\n", "data: keys must be text"),
        ("apiVersion: v1\nkind: X\na: &a [*a]\n", "not YAML"),
        ("apiVersion: v1\nkind: X\na: &a " + "x" * 1_000_000 + "\nb: [" + "*a, " * 20 + "]\n", "characters"),
        (("x: [" + "1, " * 60_000 + "]\n---\n") * 2, "more than 100000 keys"),
        ("#" * (4 * 1024 * 1024 + 1), "must have ≤ 4194304 bytes"),
        ("apiVersion: v1\nkind: X\na: " + "[" * 150 + "]" * 150 + "\n", "must have ≤ 100 levels"),
    ],
    ids=range(15),
)
def test_an_invalid_file_writes_nothing_and_names_the_place(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert main(["operator", "convert", str(path)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert f"{path}" in written.err
    assert words in written.err


def test_dates_and_times_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("apiVersion: v1\nkind: ConfigMap\ndata: {day: 2026-11-28, at: 22:30}\n")
    assert main(["operator", "convert", str(path)]) == 0
    assert yaml.load(capsys.readouterr().out, yaml.BaseLoader)["data"] == {"day": "2026-11-28", "at": "22:30"}
