"""A replica's life: it follows, leads once the lease is its own, and stops when it cannot renew it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from kvrouter.operator.reconcile.cluster import CONFLICT, Cluster, ClusterError, RequestRefused
from kvrouter.operator.reconcile.election import LeaseCandidate, LeaseTimes
from kvrouter.operator.reconcile.kinds import LEASES, Key


class LeaderListener(Protocol):
    """Is notified of the lease."""

    def answered(self) -> None:
        """The API server answered."""

    def leads(self, identity: str) -> None:
        """This replica leads from now on."""

    def follows(self, identity: str, reason: str) -> None:
        """This replica no longer leads."""

    def not_renewed(self, error: ClusterError) -> None:
        """The lease could not be read or written; it is tried again."""


class Leader:
    """``lead`` runs while the lease is ours; it is cancelled, and has ended, before another may begin."""

    def __init__(
        self, cluster: Cluster, place: Key, identity: str, *, times: LeaseTimes, listener: LeaderListener
    ) -> None:
        self._cluster, self._place, self._times, self._listener = cluster, place, times, listener
        self._candidate = LeaseCandidate(identity, place, times)
        self.is_leading = False

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Follow and lead in turn until cancelled; then the lease is given back.

        What ``lead`` raises is raised.
        """
        try:
            while True:
                if await self._is_claimed():
                    await self._lead(lead)
                else:
                    await asyncio.sleep(self._times.retry_s)
        finally:
            with suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(self._times.renew_s):
                    await self._release()

    async def _lead(self, lead: Callable[[], Awaitable[None]]) -> None:
        work = asyncio.ensure_future(lead())
        self.is_leading = True
        self._listener.leads(self._candidate.identity)
        try:
            reason = await self._renew_while(work)
        finally:
            self.is_leading = False
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        self._listener.follows(self._candidate.identity, reason)

    async def _renew_while(self, work: asyncio.Future[None]) -> str:
        """Return why the lease is ours no more."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            await asyncio.wait([work], timeout=self._times.retry_s)
            if work.done():
                work.result()
                return "it ended"
            try:
                async with asyncio.timeout_at(renewed_s + self._times.renew_s):
                    began_s = loop.time()
                    if not await self._claimed():
                        return "another replica took the lease"
                    renewed_s = began_s
            except TimeoutError:
                return f"the lease could not be renewed for {self._times.renew_s:g} s"
            except ClusterError as error:
                self._listener.not_renewed(error)
                if loop.time() >= renewed_s + self._times.renew_s:
                    return f"the lease could not be renewed for {self._times.renew_s:g} s"

    async def _is_claimed(self) -> bool:
        try:
            return await self._claimed()
        except ClusterError as error:
            if not (
                isinstance(error, RequestRefused) and error.status == CONFLICT
            ):  # then another was quicker
                self._listener.not_renewed(error)
            return False

    async def _claimed(self) -> bool:
        """Take or renew the lease; return False while it is another's."""
        lease = await self._cluster.read(LEASES, self._place)
        self._listener.answered()
        claim = self._candidate.claim(lease, asyncio.get_running_loop().time(), datetime.now(UTC))
        if claim is None:
            return False
        await (self._cluster.create if lease is None else self._cluster.replace)(LEASES, claim)
        return True

    async def _release(self) -> None:
        lease = await self._cluster.read(LEASES, self._place)
        free = self._candidate.release(lease, datetime.now(UTC))
        if free is not None:
            await self._cluster.replace(LEASES, free)
