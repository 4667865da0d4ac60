"""One deployment across zones, with processes behind its pods and a client before its Service."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import openai

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.kubelet import Kubelet, PlayedPod, ServiceProxy
from tests.system.cluster.nodes import RACKS_PER_ZONE, ZONE, ZONES
from tests.system.cluster.operators import WAIT, graph
from tests.system.cluster.pods import BY_HAND
from tests.testing.mock_server import word_ids
from tests.testing.processes import Metrics, eventually
from tests.testing.streaming_client import ANSWERED_WITHIN_S, expected_text

NAME = "llm"
USED = ZONES[:2]
"""The zones where workers may be; the third one stays empty."""

PREFILLS, DECODES = 1, 2
"""Workers of each role in each zone."""

WORKERS = {"prefill": PREFILLS * len(USED), "decode": DECODES * len(USED)}
"""How many there are in all."""

WHOLE = Counter({("prefill", zone): PREFILLS for zone in USED} | {("decode", zone): DECODES for zone in USED})
"""Where they are, as the frontend tells it."""

SPEEDUP = "20"
PROMPT_TOKENS = 200
ANSWER_TOKENS = 8
AT_ONCE = 6

_prompts = count(1)


@dataclass(frozen=True)
class Answer:
    """What a client got, and where the answer says that it was made."""

    request_id: str
    prefill_domain: str
    decode_domain: str


@dataclass
class Load:
    """Requests that go on until they are asked to stop."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


TOKEN = "only-this-tests"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
"""What whoever may ask the admin routes says."""


class Mission:
    """The deployment ``llm`` of a namespace."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        kubelet: Kubelet,
        http: httpx.AsyncClient,
        client: openai.AsyncOpenAI,
    ) -> None:
        self.plane = plane
        self.namespace = namespace
        self.kubelet = kubelet
        self.http = http
        self.openai = client

    async def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """What kubectl says in the namespace, while the pods go on."""
        where = ("--namespace", self.namespace)
        return await asyncio.to_thread(self.plane.kubectl, *arguments, *where, stdin=stdin)

    async def read(self, *arguments: str) -> dict[str, Any]:
        """What ``kubectl get ARGUMENTS`` answers, as JSON."""
        answer: dict[str, Any] = json.loads(await self.kubectl("get", *arguments, "--output", "json"))
        return answer

    async def until_is(self, condition: str) -> None:
        """Return once the deployment's status has this condition."""
        await self.kubectl("wait", f"--for=condition={condition}", f"dgd/{NAME}", WAIT)

    async def condition(self, kind: str) -> dict[str, str]:
        """One condition of the deployment's status."""
        status = (await self.read("dgd", NAME))["status"]
        return next(each for each in status["conditions"] if each["type"] == kind)

    async def scale(self, **replicas: int) -> None:
        """Let the deployment's components have so many pods, by one change."""
        components = (await self.read("dgd", NAME))["spec"]["components"]
        patch = [
            {"op": "add", "path": f"/spec/components/{index}/replicas", "value": replicas[each["name"]]}
            for index, each in enumerate(components)
            if each["name"] in replicas
        ]
        await self.kubectl("patch", "dgd", NAME, "--type=json", "--patch", json.dumps(patch))

    async def until_whole(self) -> None:
        """Return once all workers are there, in the status and at the frontend."""
        await self.until_is("Ready=True")

        async def is_whole() -> bool:
            models = (await self.http.get("/v1/models")).raise_for_status().json()["data"]
            return bool(models) and await self.places() == WHOLE

        await eventually(is_whole)

    async def fleet(self) -> list[dict[str, Any]]:
        """The workers as the frontend knows them."""
        page = (await self.http.get("/v1/fleet")).raise_for_status().json()
        found: list[dict[str, Any]] = page["workers"]
        return found

    async def places(self) -> Counter[tuple[str, str]]:
        """How many workers the frontend knows that can take requests, by role and zone."""
        return Counter(
            (worker["role"], worker["domains"].get("zone", ""))
            for worker in await self.fleet()
            if worker["alive"] and not worker["draining"]
        )

    async def metrics(self) -> Metrics:
        return Metrics((await self.http.get("/metrics")).raise_for_status().text)

    async def ask(self) -> Answer:
        """Ask once, with a prompt that nobody sent before; raises what the client raises."""
        prompt = word_ids(first=next(_prompts), n=PROMPT_TOKENS)
        raw = await self.openai.completions.with_raw_response.create(
            model="mock", prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0
        )
        answer = raw.parse()
        assert answer.choices[0].text == expected_text(prompt, ANSWER_TOKENS)
        reported = raw.headers
        return Answer(
            reported["x-request-id"],
            reported.get("x-kvrouter-prefill-domain", ""),
            reported["x-kvrouter-decode-domain"],
        )

    async def ask_often(self, n: int) -> list[Answer]:
        """Ask ``n`` times, some at once."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one() -> Answer:
            async with turns:
                return await self.ask()

        return await asyncio.gather(*(one() for _ in range(n)))

    async def ask_until_used(self, *expected: str) -> list[Answer]:
        """Ask until each of these zones has had a part of it; answers with all that came of it."""
        answers: list[Answer] = []

        async def are_used() -> bool:
            answers.extend(await self.ask_often(2 * AT_ONCE))
            return {prefill for prefill, _ in zones(answers)} >= set(expected)

        await eventually(are_used)
        return answers

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[Load]:
        """Ask again and again, each time on a new connection, as new clients of the Service do."""
        load = Load()
        goes_on = True

        async def go_on() -> None:
            while goes_on:
                try:
                    load.answers.append(await self.ask())
                except openai.APIError as error:
                    load.failures.append(f"{type(error).__name__}: {error}")

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(go_on())
            try:
                yield load
            finally:
                goes_on = False

    def pods(self, *components: str) -> list[PlayedPod]:
        """The pods of these components that nobody deletes; of all without any."""
        return [pod for name in components or COMPONENTS for pod in self.kubelet.of(name)]

    async def lose(self, component: str, zone: str) -> None:
        """Let no pod be scheduled in a zone any more, and delete those of a component that are there; return
        once the frontend knows.
        """
        await self.kubectl("cordon", *nodes_of(zone))
        lost = [pod.name for pod in self.kubelet.of(component) if node_zone(pod) == zone]
        assert lost
        await self.kubectl("delete", "pods", *lost, WAIT)

        async def is_known() -> bool:
            return not (await self.places())[component, zone]

        await eventually(is_known)


COMPONENTS = ("frontend", "prefill", "decode")


def nodes_of(zone: str) -> list[str]:
    """The nodes of a zone."""
    return [f"{zone}-{number}" for number in range(RACKS_PER_ZONE)]


def node_zone(pod: PlayedPod) -> str:
    """The zone that a pod was bound to."""
    return str(pod.stored["spec"]["nodeName"]).rpartition("-")[0]


def deployment(
    namespace: str, policy: Mapping[str, object], environ: Iterable[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The manifest: workers in two of the three zones, and none of them to begin with."""
    made = graph(namespace, NAME, **policy)
    zones = {"key": ZONE, "operator": "In", "values": list(USED)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [zones]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    env = [{"name": name, "value": value} for name, value in environ]
    for component in made["spec"]["components"]:
        template = component.setdefault("podTemplate", {"spec": {}})
        template["metadata"] = {"labels": dict(BY_HAND)}
        template["spec"]["enableServiceLinks"] = True  # and one of the Services is called as we are
        if component["type"] != "frontend":
            component["replicas"] = 0
            template["spec"]["affinity"] = affinity
            (main,) = template["spec"]["containers"]
            main["args"] += ["--speedup", SPEEDUP]
            main["env"] = env
    return made


@asynccontextmanager
async def mission(plane: ControlPlane, manifest: dict[str, Any]) -> AsyncIterator[Mission]:
    """Apply a deployment; play its pods, and the Service before its frontends, once they are there."""
    namespace = manifest["metadata"]["namespace"]
    async with AsyncExitStack() as stack:
        kubelet = await stack.enter_async_context(Kubelet(plane, namespace))
        await asyncio.to_thread(plane.apply, _stranger(namespace), _admin(namespace), manifest)
        service = ("service", f"{NAME}-frontend", "--namespace", namespace)
        await asyncio.to_thread(plane.kubectl, "wait", "--for=create", *service, WAIT)
        spec = (await asyncio.to_thread(plane.read, *service))["spec"]
        door = ServiceProxy(kubelet, spec["selector"], spec["ports"][0]["targetPort"])
        await stack.enter_async_context(door)
        # A connection for each call, so that the Service chooses the pod each time.
        alone = {"Connection": "close"}
        http = httpx.AsyncClient(base_url=door.url, timeout=ANSWERED_WITHIN_S, headers={**alone, **ADMIN})
        client = openai.AsyncOpenAI(
            base_url=f"{door.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=ANSWERED_WITHIN_S,
            default_headers=alone,
        )
        await stack.enter_async_context(http)
        await stack.enter_async_context(client)
        yield Mission(plane, namespace, kubelet, http, client)


def _admin(namespace: str) -> dict[str, Any]:
    """The token of the frontends' admin routes."""
    metadata = {"namespace": namespace, "name": "kvrouter-admin"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": TOKEN}}


def _stranger(namespace: str) -> dict[str, Any]:
    """A Service that nobody here asks: containers get it by variables that begin as ours do."""
    metadata = {"namespace": namespace, "name": "kvrouter"}
    ports = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9090}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}}


def zones(answers: Sequence[Answer]) -> Counter[tuple[str, str]]:
    """How many answers were prefilled and decoded where; an empty zone is nobody's."""
    return Counter((_zone(answer.prefill_domain), _zone(answer.decode_domain)) for answer in answers)


def _zone(domains: str) -> str:
    """``zone=a,rack=r`` is in zone a."""
    return dict(part.split("=", 1) for part in domains.split(",") if part).get("zone", "")
