"""A dry run at admission: a plan is tried at the API server before the deployment is stored."""

import asyncio
import re

from kvrouter.kube.client import ClusterError, KubeClient, RequestRefused, collected_warnings
from kvrouter.kube.objects import Manifest, key_of
from kvrouter.operator.admission.review import Review
from kvrouter.operator.admission.validate import Verdict, changed_manifests
from kvrouter.operator.cluster_info import ClusterFacts
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.reconcile.apply import ObjectRef, is_orphan, kind_of, owner_uid_of
from kvrouter.settings.problems import Path, Problem

WITHIN_S = 3.0
"""What is left of the API server's ten seconds after topologies were read, with some to spare."""
AT_A_TIME = 8
MESSAGE_CHARS_MAX = 1024

_NO_RIGHT = re.compile(
    r'user "[^"]*" (cannot \w+ resource|.*attempting to grant RBAC permissions)', re.IGNORECASE
)
_NO_TRIAL = "does not support dry run"


class DryRun:
    """Applies to the API server, as a dry run, what storing a deployment would make the operator apply.

    It needs no other rights than the operator has. What the API server warns of is a warning here, and so is
    what cannot be tried, or not within ``within_s`` seconds: then the status reports what is refused.
    ``namespace`` is the only one that is managed; empty for all.
    """

    def __init__(
        self, cluster: KubeClient, *, defaults: PlanDefaults, namespace: str, within_s: float = WITHIN_S
    ) -> None:
        self._cluster, self._defaults, self._namespace = cluster, defaults, namespace
        self._within_s = within_s
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def __call__(self, review: Review, facts: ClusterFacts) -> Verdict:
        """Return what would be refused. Never raises."""
        old = review.old if review.operation == "UPDATE" else None
        planned = changed_manifests(review.new, old, facts, self._defaults)
        tried = [
            (path, manifest)
            for path, manifest in planned
            # A binding needs the role that it names, and of a trial nothing is stored.
            if manifest["kind"] != "RoleBinding" and self._namespace in ("", key_of(manifest).namespace)
        ]
        problems: list[Problem] = []
        warned: list[Problem] = []
        untried: list[str] = []
        try:
            async with asyncio.timeout(self._within_s), asyncio.TaskGroup() as group:
                for path, manifest in tried:
                    group.create_task(self._try(path, manifest, problems, warned, untried))
        except TimeoutError:
            untried.append(f"no answer within {self._within_s:g} s")
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
        place = ObjectRef(kind.name, key_of(manifest))
        async with self._turns:
            try:
                with collected_warnings() as texts:
                    await self._cluster.dry_run(kind, manifest)
                warned += [Problem(path, f"the API server warns of {place}: {text}") for text in texts]
            except RequestRefused as refused:
                if not _is_about_the_object(refused):
                    untried.append(f"{place}: {refused.detail}")
                elif not await self._is_anothers(manifest):
                    said = refused.detail[:MESSAGE_CHARS_MAX]
                    problems.append(Problem(path, f"the API server would refuse {place}: {said}"))
            except ClusterError as error:
                untried.append(f"{place}: {error.message}")

    async def _is_anothers(self, manifest: Manifest) -> bool:
        """Whether an object is there that is not this deployment's: that is never overwritten."""
        try:
            there = await self._cluster.read(kind_of(manifest), key_of(manifest))
        except ClusterError:
            return False
        is_mine = there is None or owner_uid_of(there) == owner_uid_of(manifest)
        return not is_mine and there is not None and not is_orphan(there, manifest)


def _is_about_the_object(refused: RequestRefused) -> bool:
    """Whether it would be refused in earnest, as far as the object goes."""
    if _NO_RIGHT.search(refused.detail) or _NO_TRIAL in refused.detail:
        return False
    return refused.is_lasting and refused.status not in (401, 404, 405)


def _untried_warning(untried: list[str]) -> list[Problem]:
    if not untried:
        return []
    more = f" and {len(untried) - 1} more" if len(untried) > 1 else ""
    said = f"was not tried at the API server beforehand, so see its status: {untried[0]}{more}"
    return [Problem(("spec",), said)]
