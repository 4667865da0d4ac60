"""What an engine's HTTP answers mean: the call's fault, a full engine, one that failed or is not there."""

import pytest

from kvrouter.core.engine_answer import BODY_MAX_BYTES
from kvrouter.core.errors import ContextLengthExceeded, KvrouterError
from kvrouter.engines.attach import KeyRefused
from kvrouter.engines.openai import server as server_module
from kvrouter.engines.openai.failures import ERROR_CHARS_MAX
from kvrouter.engines.openai.server import EngineServer, PageFailed
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from tests.testing.constants import SetConstants
from tests.testing.scripted_engine import (
    JSON,
    AnswerEnd,
    ScriptedAnswer,
    ScriptedEngine,
    page,
    scripted_engine,
)

COMPLETIONS = "/v1/completions"


class Asked:
    """A scripted engine, and a server that reaches it."""

    def __init__(
        self, *answers: ScriptedAnswer, api_key: str | None = None, look_limit_s: float = 30.0
    ) -> None:
        self.engine = ScriptedEngine()
        self.engine.answers.extend(answers)
        self._api_key = api_key
        self._look_limit_s = look_limit_s

    async def __aenter__(self) -> "Asked":
        await self.engine.start()
        self.server = EngineServer(
            self.engine.url + "/", api_key=self._api_key, look_limit_s=self._look_limit_s
        )
        await self.server.open()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.server.close()
        await self.engine.stop()


async def test_look_returns_the_page_or_none_for_a_missing_path() -> None:
    async with Asked(api_key="secret") as asked:
        assert await asked.server.look("/version") == b'{"version":"0.32.0"}'
        assert await asked.server.look("/nothing") is None
        asked.engine.set_page("/odd", b"", status=405)
        assert await asked.server.look("/odd") is None
        assert [each["Authorization"] for each in asked.engine.question_headers] == ["Bearer secret"] * 3


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
async def test_look_answered_with_an_error_raises_worker_unreachable(status: int) -> None:
    async with Asked() as asked:
        asked.engine.set_page("/metrics", '{"error":{"message":"not now"}}', status=status)
        with pytest.raises(WorkerUnreachable, match=rf"/metrics answered {status}: not now"):
            await asked.server.look("/metrics")


@pytest.mark.parametrize("status", [401, 403])
async def test_look_refused_for_its_api_key_raises_key_refused(status: int) -> None:
    async with Asked() as asked:
        asked.engine.set_page("/v1/models", '{"error":"Unauthorized"}', status=status)
        with pytest.raises(KeyRefused, match="Unauthorized"):
            await asked.server.look("/v1/models")


async def test_look_without_a_whole_answer_times_out() -> None:
    async with Asked(look_limit_s=0.05) as asked:
        asked.engine.pages["/metrics"] = ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        with pytest.raises(PageFailed, match="did not answer in time"):
            await asked.server.look("/metrics")
        asked.engine.pages["/metrics"] = ScriptedAnswer((b"vllm:",), ends=AnswerEnd.HELD)
        with pytest.raises(PageFailed, match="did not answer in time"):
            await asked.server.look("/metrics")


async def test_too_long_answer_is_given_up(set_constants: SetConstants) -> None:
    set_constants(server_module, ANSWER_MAX_BYTES=1000, PAGE_MAX_BYTES=1000)
    long = ScriptedAnswer((b"x" * 1001,), content_type=JSON)
    async with Asked(long) as asked:
        asked.engine.pages["/v1/models"] = long
        with pytest.raises(WorkerUnreachable, match="over the 1000 bytes"):
            await asked.server.look("/v1/models")
        with pytest.raises(StreamBroken, match="over the 1000 bytes"):
            await asked.server.ask(COMPLETIONS, b"{}")


async def test_metrics_gives_only_wanted_lines_and_stops_at_a_limit() -> None:
    async with Asked() as asked:
        short = ScriptedAnswer(
            (b"# TYPE a gauge\na 1\naa 2\n", b'a{b="c"} 3\nb 4\n', b"a 5"), content_type="text/plain"
        )
        asked.engine.pages["/metrics"] = short
        assert await asked.server.metrics(("a",)) == b'a 1\na{b="c"} 3\na 5\n'
        assert not asked.server.has_long_metrics
        endless = ScriptedAnswer(
            (b"a 1\n", *([b"x" * 2**20] * 9), b"\na 2\n"), ends=AnswerEnd.HELD, content_type="text/plain"
        )
        asked.engine.pages["/metrics"] = endless
        assert await asked.server.metrics(("a",)) == b"a 1\n"
        assert asked.server.has_long_metrics


async def test_only_the_beginning_of_a_long_error_body_is_read() -> None:
    async with Asked() as asked:
        error = b'{"error":{"message":"' + b"x" * (BODY_MAX_BYTES + 1)
        asked.engine.pages["/version"] = ScriptedAnswer((error,), status=500, ends=AnswerEnd.HELD)
        with pytest.raises(WorkerUnreachable, match=f"answered 500: .{{{ERROR_CHARS_MAX}}}$"):
            await asked.server.look("/version")


async def test_server_that_is_down_is_unreachable_until_it_is_back() -> None:
    async with Asked() as asked:
        await asked.engine.stop()
        for asking in (asked.server.look("/metrics"), asked.server.ask(COMPLETIONS, b"{}")):
            with pytest.raises(WorkerUnreachable, match="nothing listens at its host and port"):
                await asking
        await asked.engine.start()
        assert await asked.server.look("/version") is not None


async def test_call_arrives_unchanged_and_its_whole_answer_returns() -> None:
    whole = page("vllm-0.32.0-completion.json")
    async with Asked(ScriptedAnswer((whole[:9], whole[9:]), content_type=JSON)) as asked:
        answer = await asked.server.ask(COMPLETIONS, b'{ "a" : 1.0 }', {"X-Request-Id": "r-1"})
        assert answer == whole
        call = await asked.engine.called()
        assert (call.path, call.raw) == (COMPLETIONS, b'{ "a" : 1.0 }')
        assert (call.headers["x-request-id"], call.headers["content-type"]) == ("r-1", JSON)


async def test_call_error_has_the_class_of_its_status() -> None:
    answers = [
        ScriptedAnswer.error(400, "vllm-0.32.0-error-context.json"),
        ScriptedAnswer((b"",), status=503),
        ScriptedAnswer((b"boom",), status=500),
    ]
    async with Asked(*answers) as asked:
        for kind in (ContextLengthExceeded, WorkerFull, WorkerUnreachable):
            with pytest.raises(kind):
                await asked.server.post(COMPLETIONS, b"{}")


async def test_connection_closed_before_or_within_an_answer_breaks_the_stream() -> None:
    refused, cut = (
        ScriptedAnswer(ends=AnswerEnd.REFUSED),
        ScriptedAnswer((b'{"id":',), content_type=JSON, ends=AnswerEnd.CUT),
    )
    async with Asked(refused, cut) as asked:
        with pytest.raises(StreamBroken, match="took the call: it closed the connection before it answered"):
            await asked.server.ask(COMPLETIONS, b"{}")
        with pytest.raises(StreamBroken, match="its answer broke off"):
            await asked.server.ask(COMPLETIONS, b"{}")


async def test_client_error_messages_do_not_reveal_the_engine_address() -> None:
    answers = [
        ScriptedAnswer((b"boom",), status=500),
        ScriptedAnswer((b"",), status=503),
        ScriptedAnswer(ends=AnswerEnd.REFUSED),
        ScriptedAnswer((b"{",), content_type=JSON, ends=AnswerEnd.CUT),
    ]
    async with Asked(*answers) as asked:
        host, port = asked.engine.url.removeprefix("http://").split(":")
        for _ in answers:
            with pytest.raises(KvrouterError) as failed:
                await asked.server.ask(COMPLETIONS, b"{}")
            assert host not in failed.value.message
        await asked.engine.stop()
        with pytest.raises(WorkerUnreachable, match="nothing listens") as gone:
            await asked.server.ask(COMPLETIONS, b"{}")
        assert port not in gone.value.message
        with pytest.raises(WorkerUnreachable, match=rf"{asked.engine.url}/metrics: connection refused"):
            await asked.server.look("/metrics")


async def test_closed_engine_server_makes_no_more_requests() -> None:
    async with scripted_engine() as engine:
        server = EngineServer(engine.url)
        await server.open()
        await server.close()
        await server.close()
        with pytest.raises(WorkerUnreachable, match="left alone"):
            await server.look("/version")
