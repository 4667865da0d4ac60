"""Recovery over NATS: requests to workers about lost events, and their answers.

A request is a nonce (16 bytes) and a question; its answer is sealed for the nonce, so that it cannot answer
another request. A worker answers a nonce once.
"""

import asyncio
import secrets
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.transports.events.port import MalformedSink, RecoverySource
from kvrouter.transports.events.recovery import (
    ANSWER_TIMEOUT_S,
    QUESTION_MAX_BYTES,
    Ask,
    RecoveryAnswers,
    RecoveryQuestions,
)
from kvrouter.transports.events.subjects import message_auth_of, recovery_subject
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, ReplayGuard
from kvrouter.transports.nats_client import CLIENT_ERRORS, unsubscribe

QUESTIONS_UNREAD_MAX = 1_024

NONCE_BYTES = 16

ANSWERED_MAX = 16_384
"""Remembered nonces: a replayed request is answered again after this many others."""

NOBODY_RETRY_S = 0.2
"""Pause before the second request when the worker has no subscription: its card may arrive earlier."""


class NatsRecovery:
    """Both ends of recovery in one process: it answers for its workers and asks others, on the event loop."""

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        token: str,
        on_malformed: MalformedSink,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._auth = message_auth_of(token, namespace)
        self._answered = ReplayGuard(remembered_max=ANSWERED_MAX)
        self._on_malformed = on_malformed
        self._answer_timeout_s = answer_timeout_s
        self._recovery_answers = RecoveryAnswers()
        questions = RecoveryQuestions(self._ask_of, timeout_s=answer_timeout_s)
        self.recover_range, self.recover_snapshot = questions.recover_range, questions.recover_snapshot
        self._subscribing: dict[WorkerId, asyncio.Task[Subscription]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def serve_recovery(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Let ``source`` answer for the worker; return the function that ends it."""
        end_source = self._recovery_answers.serve(worker_id, source)
        if worker_id not in self._subscribing:
            self._subscribing[worker_id] = asyncio.create_task(
                self._client.subscribe(
                    recovery_subject(self._namespace, worker_id),
                    cb=self._asked,
                    pending_msgs_limit=QUESTIONS_UNREAD_MAX,
                )
            )

        def end() -> None:
            end_source()
            if not self._recovery_answers.serves(worker_id) and worker_id in self._subscribing:
                ending = asyncio.create_task(unsubscribe(self._subscribing.pop(worker_id)))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

        return end

    async def close(self) -> None:
        """Stop answering."""
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        subscribing = list(self._subscribing.values())
        self._subscribing.clear()
        await asyncio.gather(*map(unsubscribe, subscribing))

    def _ask_of(self, rank: WorkerRank) -> Ask:
        subject = recovery_subject(self._namespace, rank.worker_id)

        async def ask(question: bytes) -> bytes | None:
            try:
                return await self._request(subject, question)
            except NoRespondersError:
                await asyncio.sleep(NOBODY_RETRY_S)
            try:
                return await self._request(subject, question)
            except NoRespondersError:
                return None

        return ask

    async def _request(self, subject: str, question: bytes) -> bytes | None:
        if not self._client.is_connected:
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        message = self._auth.seal(subject, nonce + question)
        try:
            answer = await self._client.request(subject, message, timeout=self._answer_timeout_s)
        except NoRespondersError:
            raise
        except CLIENT_ERRORS:  # the connection broke, or the answer is late
            return None
        try:
            return bytes(self._auth.opened(_answer_subject(subject, nonce), answer.data))
        except ProtocolError as error:
            self._on_malformed(error.message)
            raise

    async def _asked(self, message: Msg) -> None:
        if len(message.data) > MESSAGE_AUTH_BYTES + NONCE_BYTES + QUESTION_MAX_BYTES or not message.reply:
            self._on_malformed(f"question: {len(message.data)} bytes, to be answered at {message.reply!r}")
            return
        try:
            answer = self._answer(message.subject, message.data)
        except ProtocolError as error:
            self._on_malformed(error.message)
            return
        try:
            await message.respond(answer)
        except CLIENT_ERRORS:
            return  # the connection broke; the router asks again

    def _answer(self, subject: str, message: bytes) -> bytes:
        opened = self._auth.opened(subject, message)
        nonce, question = bytes(opened[:NONCE_BYTES]), opened[NONCE_BYTES:]
        if not self._answered.takes(nonce, 1):
            raise ProtocolError("a router's question came again", param="nonce")
        answer = self._recovery_answers.answer(
            question,
            frame_max_bytes=self._client.max_payload - MESSAGE_AUTH_BYTES,
            now_s=asyncio.get_running_loop().time(),
        )
        return self._auth.seal(_answer_subject(subject, nonce), answer)


def _answer_subject(subject: str, nonce: bytes) -> str:
    """Return the subject for which the answer to a request is sealed."""
    return f"{subject} {nonce.hex()}"
