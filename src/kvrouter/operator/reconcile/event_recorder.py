"""Records events about deployments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from kvrouter.kube.client import KubeClient, RequestRefused
from kvrouter.kube.objects import EVENTS, Involved, Key, Manifest, event_of, key_of, metadata_of, uid_of
from kvrouter.operator.api.deployment import API_VERSION, KIND
from kvrouter.operator.plan.manifest import MANAGER
from kvrouter.operator.reconcile.apply import Changes
from kvrouter.settings.problems import Problem, dotted

WARNINGS_REPORTED_MAX = 20
SET_BACK = (
    "was scaled by somebody else, and is set back to the replicas that its component states: leave replicas "
    "out of spec.components where an autoscaler or kubectl scale has the say"
)


class Recorder:
    """Writes events about deployments. A repeated event is counted, not written again.

    ``on_refused`` is called with an event's refusal (no right, a quota); the event is dropped, since the
    status holds all that must be known.
    """

    def __init__(
        self, client: KubeClient, identity: str, on_refused: Callable[[RequestRefused], None]
    ) -> None:
        self._client = client
        self._identity = identity
        self._on_refused = on_refused
        self._recorded: dict[Key, tuple[str, set[str]]] = {}

    async def record(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Record ``reason``, a word in CamelCase, and a sentence. Raises ClusterError."""
        event = self._event(about, reason, message, warns)
        with self._dropping_refused():
            current = await self._client.read(EVENTS, key_of(event))
            if current is None:
                await self._client.create(EVENTS, event)
                return
            count = current.get("count")
            again: Manifest = {
                "count": (count if isinstance(count, int) else 0) + 1,
                "lastTimestamp": event["lastTimestamp"],
            }
            await self._client.merge(EVENTS, key_of(event), again)

    async def record_once(self, about: Manifest, reason: str, message: str, *, warns: bool = False) -> None:
        """Record an event once for each generation of the spec. Raises ClusterError."""
        generation = f"{uid_of(about)}/{metadata_of(about).get('generation')}"
        known, names = self._recorded.get(key_of(about), ("", set()))
        if known != generation:
            names = set()
        event = self._event(about, reason, message, warns, generation)
        name = key_of(event).name
        if name in names:
            return
        with self._dropping_refused():
            if await self._client.read(EVENTS, key_of(event)) is None:
                await self._client.create(EVENTS, event)
        self._recorded[key_of(about)] = (generation, names | {name})

    async def record_warnings(self, about: Manifest, problems: Sequence[Problem]) -> None:
        """Record a warning for each user-written field without effect. Raises ClusterError."""
        messages = [f"{dotted(problem.path)} {problem.must}" for problem in problems[:WARNINGS_REPORTED_MAX]]
        if len(problems) > WARNINGS_REPORTED_MAX:
            messages.append(f"and {len(problems) - WARNINGS_REPORTED_MAX} warnings more")
        for message in messages:
            await self.record_once(about, "SpecWarning", message, warns=True)

    async def record_changes(self, about: Manifest, changes: Changes) -> None:
        """Record the written objects, and the API server's warnings about them. Raises ClusterError."""
        for text in changes.warned[:WARNINGS_REPORTED_MAX]:
            await self.record_once(about, "ApiServerWarning", text, warns=True)
        if not changes.done:
            return
        parts = [f"{verb} {', '.join(map(str, refs))}" for verb, refs in changes.done.items()]
        await self.record(about, "Applied", "; ".join(parts))
        for ref in changes.set_back:
            await self.record(about, "ReplicasSetBack", f"{ref} {SET_BACK}", warns=True)

    def forget(self, key: Key) -> None:
        """The deployment at ``key`` is gone."""
        self._recorded.pop(key, None)

    @contextmanager
    def _dropping_refused(self) -> Iterator[None]:
        try:
            yield
        except RequestRefused as refused:
            if refused.is_passing:
                raise
            self._on_refused(refused)

    def _event(
        self, about: Manifest, reason: str, message: str, warns: bool, generation: str = ""
    ) -> Manifest:
        return event_of(
            Involved(API_VERSION, KIND, key_of(about), uid_of(about)),
            reason,
            message,
            warns=warns,
            reporter=MANAGER,
            instance=self._identity,
            now=datetime.now(UTC),
            digest_of=generation,
        )
