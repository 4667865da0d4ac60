"""A dry run at admission: applies a plan to the API server before the deployment is stored."""

import asyncio
import re

from kvrouter.kube.client import ClusterError, KubeClient, RequestRefused, collected_warnings
from kvrouter.kube.objects import Manifest, key_of
from kvrouter.operator.admission.review import Review
from kvrouter.operator.admission.validate import Verdict, changed_manifests
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.reconcile.apply import ObjectRef, is_orphan, kind_of, owner_uid_of
from kvrouter.settings.problems import Path, Problem

AT_A_TIME = 8
MESSAGE_CHARS_MAX = 1024

_NO_RIGHT = re.compile(
    r'user "[^"]*" (cannot \w+ resource|.*attempting to grant RBAC permissions)', re.IGNORECASE
)
_NO_TRIAL = "does not support dry run"


class DryRun:
    """Applies to the API server, as a dry run, what storing a deployment would make the operator apply.

    It needs no rights beyond the operator's. The API server's warnings become warnings, and so do objects
    that cannot be tried, or not within ``within_s`` seconds: the status then reports the refusals.
    ``namespace`` is the only one that is managed; empty for all.
    """

    def __init__(self, client: KubeClient, *, defaults: PlanDefaults, namespace: str) -> None:
        self._client, self._defaults, self._namespace = client, defaults, namespace
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def __call__(self, review: Review, cluster_info: ClusterInfo, within_s: float) -> Verdict:
        """Return the verdict, with a problem for each refused object. Never raises."""
        old = review.old if review.operation == "UPDATE" else None
        planned = changed_manifests(review.new, old, cluster_info, self._defaults)
        tried = [
            (path, manifest)
            for path, manifest in planned
            # A RoleBinding needs its Role, which a dry run does not store.
            if manifest["kind"] != "RoleBinding" and self._namespace in ("", key_of(manifest).namespace)
        ]
        problems: list[Problem] = []
        warned: list[Problem] = []
        untried: list[str] = []
        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                for path, manifest in tried:
                    group.create_task(self._try(path, manifest, problems, warned, untried))
        except TimeoutError:
            untried.append(f"no answer within {within_s:.2g} s")
        for found in (problems, warned):
            found.sort(key=lambda problem: ([str(part) for part in problem.path], problem.must))
        return Verdict(tuple(problems), (*warned, *_untried_warning(untried)))

    async def _try(
        self,
        path: Path,
        manifest: Manifest,
        problems: list[Problem],
        warned: list[Problem],
        untried: list[str],
    ) -> None:
        kind = kind_of(manifest)
        ref = ObjectRef(kind.name, key_of(manifest))
        async with self._turns:
            try:
                with collected_warnings() as texts:
                    await self._client.dry_run(kind, manifest)
                warned += [Problem(path, f"the API server warns of {ref}: {text}") for text in texts]
            except RequestRefused as refused:
                if not _is_about_the_object(refused):
                    untried.append(f"{ref}: {refused.detail}")
                elif not await self._is_anothers(manifest):
                    message = refused.detail[:MESSAGE_CHARS_MAX]
                    problems.append(Problem(path, f"the API server would refuse {ref}: {message}"))
            except ClusterError as error:
                untried.append(f"{ref}: {error.message}")

    async def _is_anothers(self, manifest: Manifest) -> bool:
        """Whether the object exists and is not this deployment's: it is never overwritten then."""
        try:
            current = await self._client.read(kind_of(manifest), key_of(manifest))
        except ClusterError:
            return False
        is_mine = current is None or owner_uid_of(current) == owner_uid_of(manifest)
        return not is_mine and current is not None and not is_orphan(current, manifest)


def _is_about_the_object(refused: RequestRefused) -> bool:
    """Whether the real write would be refused too, because of the object."""
    if _NO_RIGHT.search(refused.detail) or _NO_TRIAL in refused.detail:
        return False
    return refused.is_lasting and refused.status not in (401, 404, 405)


def _untried_warning(untried: list[str]) -> list[Problem]:
    if not untried:
        return []
    more = f" and {len(untried) - 1} more" if len(untried) > 1 else ""
    message = f"was not tried at the API server beforehand, so see its status: {untried[0]}{more}"
    return [Problem(("spec",), message)]
