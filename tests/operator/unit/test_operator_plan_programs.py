"""A worker container that can't register with kvrouter is named, and what to run in its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.operator.admission.review import WARNING_CHARS_MAX, line
from kvrouter.operator.admission.validate import validate
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.settings.problems import Path, dotted

Container = dict[str, JsonValue]

DEFAULTS = PlanDefaults(image="example.com/kvrouter:1")
RUNTIME = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1"
WORKER: Container = {"name": "main", "args": ["worker", "vllm", "--url", "http://127.0.0.1:8100"]}
FRONTEND: Container = {"name": "main", "args": ["frontend"]}
NAMED: Path = ("spec", "components", 1, "podTemplate", "spec", "containers", 0)


def warned(
    *containers: Container,
    sidecars: tuple[Container, ...] = (),
    labels: dict[str, JsonValue] | None = None,
    frontend: Container = FRONTEND,
) -> dict[str, str]:
    """What admission warns of, by place: of a frontend, and a worker with these containers."""
    worker: dict[str, JsonValue] = {
        "metadata": {"labels": labels or {}},
        "spec": {
            "containers": [*containers],
            "initContainers": [{"restartPolicy": "Always", **sidecar} for sidecar in sidecars],
        },
    }
    deployment = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "llm", "namespace": "fleet"},
        "spec": {
            "components": [
                {"name": "frontend", "type": "frontend", "podTemplate": {"spec": {"containers": [frontend]}}},
                {"name": "decode", "type": "worker", "podTemplate": worker},
            ]
        },
    }
    verdict = validate(deployment, None, ClusterInfo(), DEFAULTS)
    assert verdict.is_allowed
    assert all(len(line(warning)) <= WARNING_CHARS_MAX for warning in verdict.warnings)
    return {dotted(warning.path): warning.must for warning in verdict.warnings}


@pytest.mark.parametrize(
    ("container", "engine"),
    [
        ({"image": RUNTIME, "command": ["python3", "-m", "dynamo.vllm"], "args": ["--model", "q"]}, "vllm"),
        ({"image": RUNTIME, "command": ["python3"], "args": ["-m", "dynamo.sglang"]}, "sglang"),
        ({"image": "my/own:1", "command": ["/bin/sh", "-c"], "args": ["python3 -m dynamo.trtllm"]}, "trtllm"),
        ({"image": RUNTIME, "args": ["--model", "q"]}, "vllm"),
        ({"image": "registry:5000/sglang-runtime@sha256:abc"}, "sglang"),
        ({"image": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:${VERSION}"}, "trtllm"),
    ],
)
def test_dynamo_worker_is_warned_of_with_the_kvrouter_worker_to_run(
    container: Container, engine: str
) -> None:
    said = warned({"name": "main", **container})[dotted(NAMED)]
    assert "speaks Dynamo's protocol and never registers here" in said
    assert f"[worker, {engine}, --url, URL]" in said


@pytest.mark.parametrize(
    "container",
    [
        {"image": RUNTIME, "command": ["python3", "-m", "dynamo.mocker"]},
        {"image": "my/own:1", "command": ["dynamo-run"], "args": ["in=dyn", "out=vllm"]},
        {"image": "my/own:1", "command": ["dynamo", "serve", "graphs.agg:Frontend"]},
        {
            "image": "my/own:1",
            "command": ["dynamo-openengine-sidecar"],
            "args": ["--expected-engine", "sglang"],
        },
        {"image": "nvcr.io/nvidia/ai-dynamo/dynamo-planner:1.3.1"},
    ],
)
def test_dynamo_program_without_a_kvrouter_counterpart_is_warned_of(container: Container) -> None:
    assert "kvrouter worker --help" in warned({"name": "main", **container})[dotted(NAMED)]


@pytest.mark.parametrize(
    ("container", "engine"),
    [
        ({"image": "docker.io/vllm/vllm-openai:v0.32.0", "args": ["--model=q"]}, "vllm"),
        ({"image": "my/own:1", "command": ["vllm", "serve", "q"]}, "vllm"),
        ({"image": RUNTIME, "command": ["bash", "-c", "exec vllm serve q --port 8100"]}, "vllm"),
        ({"image": "my/own:1", "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"]}, "vllm"),
        ({"image": "lmsysorg/sglang:v0.5", "command": ["python3", "-m", "sglang.launch_server"]}, "sglang"),
        ({"image": "nvcr.io/nvidia/tensorrt-llm/release:1.2", "command": ["trtllm-serve", "q"]}, "trtllm"),
    ],
)
def test_engine_without_a_kvrouter_worker_is_warned_of(container: Container, engine: str) -> None:
    main: Container = {"name": "main", **container}
    said = warned(main)[dotted(NAMED)]
    assert "which never registers: run it as a sidecar" in said
    assert f"[worker, {engine}, --url, URL]" in said
    assert warned(WORKER, sidecars=({**main, "name": "engine"},)) == {}
    assert warned(WORKER, {**main, "name": "engine"}) == {}
    assert warned(main, labels={"kvrouter.dev/engine": engine}) == {}, "another process may announce it"


@pytest.mark.parametrize(
    "image",
    [
        "nvcr.io/nim/meta/llama-3.1-8b-instruct:1.8",
        "ghcr.io/huggingface/text-generation-inference:3",
        "ollama/ollama",
        "nvcr.io/nvidia/tritonserver:26.10-py3",
    ],
)
def test_model_server_without_a_kvrouter_worker_type_is_warned_of(image: str) -> None:
    assert "kvrouter worker --help" in warned({"name": "main", "image": image})[dotted(NAMED)]


def test_dynamo_sidecar_beside_a_kvrouter_worker_is_warned_of() -> None:
    sidecar: Container = {"name": "dynamo", "image": "my/own:1", "command": ["python3", "-m", "dynamo.vllm"]}
    place = "spec.components[1].podTemplate.spec.initContainers[0]"
    assert set(warned(WORKER, sidecars=(sidecar,))) == {place}


@pytest.mark.parametrize(
    "container",
    [
        {"image": "example.com/engine:1"},
        {
            "image": "example.com/engine:1",
            "args": ["--backend", "vllm", "--served-model-name", "dynamo.vllm"],
        },
        {"image": "vllm/vllm-openai:v0.32.0", "command": ["python3", "/app/in_process.py"]},
        {"image": "registry.example.com/kvrouter:0.1.0", "args": ["worker", "sglang", "--url", "http://e"]},
        {
            "image": RUNTIME,
            "command": ["bash", "-c", "vllm serve q & exec kvrouter worker vllm --url http://e"],
        },
        {"image": "my/own:1", "command": ["python3", "-m", "kvrouter.cli", "worker", "mock"]},
        {"args": ["worker", "mock"]},
    ],
)
def test_container_that_may_register_is_not_warned_of(container: Container) -> None:
    assert warned({"name": "main", **container}) == {}


@pytest.mark.parametrize("args", [["frontend"], ["up"], ["topology", "wait"]])
def test_kvrouter_command_other_than_worker_is_warned_of(args: list[JsonValue]) -> None:
    assert (
        f"runs kvrouter {args[0]}, which registers no worker"
        in warned({"name": "main", "args": args})[dotted(NAMED)]
    )


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"image": RUNTIME}, "finds none of kvrouter's workers: leave out image, command and args"),
        ({"image": "my/own:1", "command": ["python3", "-m", "dynamo.frontend"]}, "dynamo.frontend"),
        ({"image": "vllm/vllm-openai:v0.32.0"}, "finds none of kvrouter's workers"),
        ({"args": ["worker", "mock"]}, "args begin with frontend"),
    ],
)
def test_frontend_container_that_finds_no_worker_is_warned_of(container: Container, words: str) -> None:
    said = warned(WORKER, frontend={"name": "main", **container})
    assert words in said["spec.components[0].podTemplate.spec.containers[0]"]


_TEXT = st.text(max_size=20)
_WORDS = st.one_of(st.none(), _TEXT, st.lists(st.one_of(_TEXT, st.integers(), st.just("-m"), st.none())))


@given(image=st.one_of(st.none(), _TEXT), command=_WORDS, args=_WORDS)
def test_validation_survives_any_container_image_command_and_args(
    image: str | None, command: JsonValue, args: JsonValue
) -> None:
    container: Container = {"name": "main", "image": image, "command": command, "args": args}
    deployment = {
        "metadata": {"name": "llm"},
        "spec": {
            "components": [
                {"name": "w", "type": "worker", "podTemplate": {"spec": {"containers": [container]}}}
            ]
        },
    }
    validate(deployment, None, ClusterInfo(), DEFAULTS)
