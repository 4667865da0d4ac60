"""What may differ between an engine alone and the same engine through kvrouter. The page *Differences* is
written from this table, and the differential tests let nothing else differ.
"""

import gzip
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.system.differential.calls import BLAMES_ENGINE, CHAT, COMPLETION, MESSAGES, Call
from tests.system.differential.compare import Found, Seen
from tests.system.differential.vllm_answers import MODEL, PAGES, Asked, answer_of, dumps
from tests.system.differential.wire import REQUEST_ID

Holds = Callable[[Call, Seen, Found], bool]
"""Whether a field may differ so, in this call that the engine alone answers so."""


@dataclass(frozen=True)
class Difference:
    """One row: a field, where it differs and how, and why it does."""

    field: str
    calls: str
    through: str
    reason: str
    holds: Holds
    shown: str = ""
    """What the page calls the field, where the test has one for many."""


def equals(*values: object) -> Holds:
    """The field is one of these values through kvrouter."""
    return lambda call, alone, found: found.through in values


def matches(pattern: str) -> Holds:
    """The engine alone has no such field, and through kvrouter all of it is like ``pattern``."""
    compiled = re.compile(pattern)
    return lambda call, alone, found: (
        found.alone is None and compiled.fullmatch(str(found.through)) is not None
    )


def own_error(
    *messages: str,
    code: str = "invalid_request",
    param: str | None = None,
    kind: str = "invalid_request_error",
) -> Holds:
    """The body is an error of kvrouter's own, with one of these messages; ``kind`` is Anthropic's type."""

    def holds(call: Call, alone: Seen, found: Found) -> bool:
        told = [message.format(path=call.path, method=call.method) for message in messages]
        fields = {"code": code, "param": param}
        if call.path.startswith(MESSAGES):
            errors = [{"type": kind, "message": message, **fields} for message in told]
            return found.through in [dumps({"type": "error", "error": error}) for error in errors]
        rest = {"type": "invalid_request_error", "param": param, "code": code}
        return found.through in [dumps({"error": {"message": message, **rest}}) for message in told]

    return holds


def where(condition: Callable[[Call, Seen], bool], holds: Holds) -> Holds:
    """Only in these calls."""
    return lambda call, alone, found: condition(call, alone) and holds(call, alone, found)


def _status(alone: Seen) -> int:
    return int(alone.answer.status.split(" ")[1])


def _is_stream(call: Call, alone: Seen) -> bool:
    """Whether it is streamed, or was to be."""
    return bool(call.fields.get("stream")) or (alone.answer.header("content-type") or "").startswith(
        "text/event-stream"
    )


def _from_engine(call: Call, alone: Seen) -> bool:
    return call.method == "POST"


def _asks_more(call: Call, alone: Seen, found: Found) -> bool:
    """The engine is asked for tokens and for the count of them too, and for nothing else."""
    assert isinstance(found.alone, bytes)
    assert isinstance(found.through, bytes)
    own, asked = json.loads(found.alone), json.loads(found.through)
    more = {**own, "return_token_ids": True}
    usage = {"stream_options": {**(own.get("stream_options") or {}), "include_usage": True}}
    return asked in (own, {**more, **usage}, {**own, **usage}, more)


def _without_nvext(call: Call, alone: Seen, found: Found) -> bool:
    assert isinstance(found.alone, bytes)
    assert isinstance(found.through, bytes)
    if "nvext" not in call.fields:
        return False
    own = json.loads(found.alone)
    without = {name: value for name, value in own.items() if name != "nvext"}
    return _asks_more(call, alone, Found("", json.dumps(without).encode(), found.through))


def _without_fingerprint(call: Call, alone: Seen, found: Found) -> bool:
    assert isinstance(found.alone, bytes)
    return found.through == found.alone.replace(b',"system_fingerprint":"vllm-0.32.0"', b"")


def _inflated(call: Call, alone: Seen, found: Found) -> bool:
    assert isinstance(found.alone, bytes)
    return alone.answer.header("content-encoding") == "gzip" and found.through == gzip.decompress(found.alone)


def _without_slash(call: Call, alone: Seen, found: Found) -> bool:
    """It is what the engine answers to the same call without the slash."""
    answer = answer_of(Asked(call.method, call.target.rstrip("/"), dict(call.headers), call.body))
    status = "405 Method Not Allowed" if answer.status == 405 else "200 OK"
    told: dict[str, object] = {
        "status": f"HTTP/1.1 {status}",
        "body": answer.body,
        "header content-type": dict(answer.headers).get("content-type"),
    }
    return _status(alone) == 307 and found.through == told[found.field]


def _is_redirected(call: Call, alone: Seen) -> bool:
    return _status(alone) == 307


def _is_page(call: Call, alone: Seen) -> bool:
    """A page of kvrouter's, or a path or method that it does not have."""
    return call.method != "POST" or _status(alone) in (404, 405) or call.path == "/ping"


def _lists_models(call: Call, alone: Seen, found: Found) -> bool:
    """It is a list of the one model."""
    head, tail = b'{"object":"list","data":[', b"]}"
    body = found.through
    if not isinstance(body, bytes) or not (body.startswith(head) and body.endswith(tail)):
        return False
    return _is_model(call, alone, Found(found.field, found.alone, body[len(head) : -len(tail)]))


_MODEL = re.compile(
    rb'\{"id":"tiny","object":"model","created":(\d{10}),"owned_by":"kvrouter","root":"tiny","parent":null,'
    rb'"max_model_len":2048,"permission":\[\{"id":"modelperm-8950abfda7b72763","object":"model_permission",'
    rb'"created":\1,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,'
    rb'"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"\*",'
    rb'"group":null,"is_blocking":false\}\]\}'
)


def _is_model(call: Call, alone: Seen, found: Found) -> bool:
    """It is the one model; when it came is the same in both places, and not in the future."""
    if not isinstance(found.through, bytes):
        return False
    told = _MODEL.fullmatch(found.through)
    return told is not None and abs(time.time() - int(told[1])) < CREATED_WITHIN_S


def _is_refused(call: Call, alone: Seen) -> bool:
    """One of the calls with a field that the router judges."""
    return ": refused here, " in call.name


def _refuses(field: str, message: str, param: str = "") -> Holds:
    """The body says why the field is refused; the field's path is ``param``, if not the field itself."""
    return where(
        lambda call, alone: _is_refused(call, alone) and field in call.fields,
        own_error(f"{param or field}: {message}", param=param or field),
    )


def _any_of(*all_holds: Holds) -> Holds:
    return lambda call, alone, found: any(holds(call, alone, found) for holds in all_holds)


def _over_depth(call: Call, alone: Seen, found: Found) -> bool:
    path = "metadata" + "[0]" * 63
    message = f"{path}: more than 64 lists and objects inside each other (KVROUTER_BODY_MAX_DEPTH)"
    return own_error(message, code="body_over_bounds", param=path)(call, alone, found)


def _is_gzipped(call: Call, alone: Seen) -> bool:
    return ("content-encoding", "gzip") in call.headers


def _of_inflated(call: Call, alone: Seen, found: Found) -> bool:
    """It is what the engine answers to, or is asked by, the same call as it is inflated."""
    body = gzip.decompress(call.body)
    if found.field == "asked body":
        return found.through == body
    answer = answer_of(Asked(call.method, call.target, {"content-type": "application/json"}, body))
    return found.through == {"status": "HTTP/1.1 200 OK", "body": answer.body}[found.field]


def _is_head(call: Call, alone: Seen) -> bool:
    return call.method == "HEAD"


def _is_options(call: Call, alone: Seen) -> bool:
    return call.method == "OPTIONS"


def _no_json_type(call: Call, alone: Seen) -> bool:
    types = [value.lower().partition(";")[0] for name, value in call.headers if name == "content-type"]
    return call.method == "POST" and types not in (["application/json"], ["multipart/form-data"])


def _of_json_type(call: Call, alone: Seen, found: Found) -> bool:
    """It is what the engine answers to the same call of the right type."""
    answer = answer_of(Asked(call.method, call.target, {"content-type": "application/json"}, call.body))
    return found.through == {"status": "HTTP/1.1 200 OK", "body": answer.body}[found.field]


CREATED_WITHIN_S = 3600.0
_FETCHES = "where KV is fetched from is the router's to say, not its clients'"
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_OF_ITS_OWN = "It is kvrouter's own page, and no engine's."
DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "header x-request-id",
        "every call of an engine's route",
        "the call's own, or one that is made for it",
        "It names the call in the log and in `/v1/decisions/{request_id}`.",
        matches(REQUEST_ID),
    ),
    Difference(
        "header x-kvrouter-decode-worker",
        "an answer of an engine",
        "the worker that answered",
        "It says where the call went.",
        where(_from_engine, matches("[12]")),
    ),
    Difference(
        "header x-kvrouter-decode-dp-rank",
        "an answer of an engine",
        "the worker's data-parallel rank",
        "It says where the call went.",
        where(_from_engine, matches("0")),
    ),
    Difference(
        "header x-kvrouter-decode-domain",
        "an answer of an engine",
        "the worker's topology domains",
        "It says where the call went.",
        where(_from_engine, matches("")),
    ),
    Difference(
        "header x-kvrouter-overlap-blocks",
        "an answer of an engine",
        "how many blocks of the prompt were taken to be cached",
        "It says why the call went there.",
        where(_from_engine, matches("0")),
    ),
    Difference(
        "header cache-control",
        "a stream",
        "`no-cache`",
        "A proxy must not keep a stream.",
        where(_is_stream, matches("no-cache")),
    ),
    Difference(
        "header x-accel-buffering",
        "a stream",
        "`no`",
        "nginx would hold events back.",
        where(_is_stream, matches("no")),
    ),
    Difference(
        "header vary",
        "every answer",
        "absent, unless `--cors-origins` names origins",
        "Which web pages may call is for the router to say, and not for an engine behind it.",
        lambda call, alone, found: (found.alone, found.through) == ("Origin", None),
    ),
    Difference(
        "header set-cookie",
        "an answer of an engine",
        "absent",
        "A cookie of one engine means nothing to the next.",
        lambda call, alone, found: (found.alone, found.through) == ("a=b", None),
    ),
    Difference(
        "header x-of-tomorrow",
        "an answer of an engine",
        "absent",
        "Of an engine's headers pass `content-type`, `retry-after`, `retry-after-ms`, `x-should-retry`, "
        "`www-authenticate`, `allow`, `accept`, `metadata`, `endpoint-load-metrics` and `x-ratelimit-*`: "
        "others may tell of the fleet.",
        lambda call, alone, found: (found.alone, found.through) == ("a", None),
        shown="any other header",
    ),
    Difference(
        "header content-type",
        "a good answer of an engine without a type",
        "`application/json`",
        "No engine is known to leave it out, and clients read what is there.",
        where(lambda call, alone: _status(alone) == 200 and bool(alone.asked), matches("application/json")),
    ),
    Difference(
        "asked body",
        "a chat or completion that is streamed",
        "also has `return_token_ids`, and `stream_options.include_usage`",
        "Where an engine is lost in mid-answer another one goes on from the tokens. What the engine answers "
        "to it is taken back.",
        where(
            lambda call, alone: call.path in (CHAT, COMPLETION) and call.fields.get("stream") is True,
            _asks_more,
        ),
    ),
    Difference(
        "asked body",
        "a call with `nvext`",
        "`nvext` is taken out",
        "It is for the router. One that is streamed also has what the row above says.",
        _without_nvext,
    ),
    Difference(
        "asked route",
        "a call with a query",
        "the query does not reach the engine",
        "No route of an engine reads one.",
        where(
            lambda call, alone: "?" in call.target,
            lambda call, alone, found: found.through == f"POST {call.path}",
        ),
    ),
    Difference(
        "asked route",
        "a slash behind a path",
        "the engine is asked without it",
        "The call is answered at once: vLLM answers 307, and many clients do not follow one with a body.",
        where(
            _is_redirected,
            lambda call, alone, found: found.through == f"POST {call.path.rstrip('/')}",
        ),
    ),
    Difference(
        "times asked",
        "an error that blames the engine, or one that it is full (401, 403, 408, 429, 500, 502, 503, 504)",
        "each engine is asked once",
        "Another engine may be well. At the end the last one's answer passes.",
        where(lambda call, alone: _status(alone) in BLAMES_ENGINE, equals("2")),
    ),
    Difference(
        "header content-encoding",
        "an answer that the engine compressed",
        "absent",
        "The end and the count of an answer are read in it.",
        lambda call, alone, found: found.alone == "gzip" and found.through is None,
    ),
    Difference(
        "body",
        "an answer that the engine compressed",
        "inflated",
        "The end and the count of an answer are read in it.",
        _inflated,
    ),
    Difference(
        "body",
        "a stream of a chat or completion that ends without a `finish_reason` that can be read",
        "`system_fingerprint` is absent",
        "An engine that is asked for the usage writes it next to that, and not into the last event. From "
        "there it is put back where that event is known.",
        where(lambda call, alone: call.path in (CHAT, COMPLETION), _without_fingerprint),
    ),
    Difference(
        "header location",
        "a slash behind a path",
        "absent",
        "The call is answered at once: vLLM answers 307, and many clients do not follow one with a body.",
        where(_is_redirected, equals(None)),
    ),
    Difference(
        "status",
        "a slash behind a path",
        "that of the answer",
        "The call is answered at once.",
        _without_slash,
    ),
    Difference(
        "body", "a slash behind a path", "that of the answer", "The call is answered at once.", _without_slash
    ),
    Difference(
        "header content-type",
        "a slash behind a path",
        "that of the answer",
        "The call is answered at once.",
        _without_slash,
    ),
    Difference(
        "body",
        "a model that is not served",
        "names the models that are, with the code `model_not_found`",
        "Whether a model is served is for the router to say: no engine is asked.",
        where(
            lambda call, alone: call.fields.get("model") == "nobody's",
            own_error(
                f'model: "nobody\'s" is not served here; known: {MODEL}',
                code="model_not_found",
                param="model",
                kind="not_found_error",
            ),
        ),
    ),
    Difference(
        "times asked",
        "a model that is not served",
        "no engine is asked",
        "Whether a model is served is for the router to say.",
        where(lambda call, alone: call.fields.get("model") == "nobody's", equals("0")),
    ),
    Difference(
        "header content-security-policy",
        "a page of kvrouter's own, and a path or method that it does not have",
        "a policy under which a browser runs nothing of it",
        _OF_ITS_OWN,
        where(_is_page, equals(_POLICY)),
    ),
    Difference(
        "header x-content-type-options",
        "a page of kvrouter's own, and a path or method that it does not have",
        "`nosniff`",
        _OF_ITS_OWN,
        where(_is_page, equals("nosniff")),
    ),
    Difference(
        "body",
        "`/health`",
        "how kvrouter is, and how many requests it has under way",
        _OF_ITS_OWN,
        where(lambda call, alone: call.path == "/health", equals(b'{"status":"ok","running_requests":0}')),
    ),
    Difference(
        "header content-type",
        "`/health`",
        "`application/json`",
        _OF_ITS_OWN,
        where(lambda call, alone: call.path == "/health", equals("application/json")),
    ),
    Difference(
        "body",
        "a path that kvrouter does not have",
        "an error in the form of the API that was called",
        "Routes that change an engine, or read what one engine keeps, are not passed.",
        where(
            lambda call, alone: _status(alone) == 404,
            own_error("nothing is at {path}", code="not_found", kind="not_found_error"),
        ),
    ),
    Difference(
        "body",
        "a method that a path does not take",
        "an error in the form of the API that was called",
        "Clients of an API read its errors; vLLM's is FastAPI's.",
        where(
            lambda call, alone: _status(alone) == 405,
            own_error(
                "{path} takes POST, not {method}",
                "{path} takes GET, HEAD, not {method}",
                code="method_not_allowed",
            ),
        ),
    ),
    Difference(
        "header allow",
        "a page that takes GET",
        "also names HEAD",
        "Pages take HEAD where they take GET.",
        lambda call, alone, found: (found.alone, found.through) == ("GET", "GET, HEAD"),
    ),
    Difference(
        "times asked",
        "a page, and a path or method that kvrouter does not have",
        "no engine is asked",
        "It is kvrouter's to answer.",
        where(
            lambda call, alone: _status(alone) in (404, 405) or call.path.rstrip("/") in PAGES,
            equals("0"),
        ),
    ),
    Difference(
        "body",
        "`GET /v1/models`",
        "`created`, `owned_by`, `root` and `permission` are kvrouter's",
        "A model is what a fleet serves, and not one engine's folder.",
        where(lambda call, alone: call.path.rstrip("/") == "/v1/models", _lists_models),
    ),
    Difference(
        "body",
        "`GET /v1/models/{id}`",
        "the model, as it is listed",
        "OpenAI's clients ask for one model; vLLM has no such route.",
        where(lambda call, alone: call.path == f"/v1/models/{MODEL}", _is_model),
    ),
    Difference(
        "status",
        "`GET /v1/models/{id}`",
        "200",
        "OpenAI's clients ask for one model; vLLM has no such route.",
        where(lambda call, alone: call.path == f"/v1/models/{MODEL}", equals("HTTP/1.1 200 OK")),
    ),
    Difference(
        "status",
        "a body whose `content-type` is not that of JSON",
        "that of the same call as JSON",
        "kvrouter reads the body whatever its type is, and tells the engine that it is JSON.",
        where(_no_json_type, _of_json_type),
    ),
    Difference(
        "body",
        "a body whose `content-type` is not that of JSON",
        "that of the same call as JSON",
        "kvrouter reads the body whatever its type is, and tells the engine that it is JSON.",
        where(_no_json_type, _of_json_type),
    ),
    Difference(
        "status",
        "a call with a field that is for the router to judge, as the next rows say",
        "400",
        "What reached an engine could go where no policy lets it, or take from others what they pay for.",
        where(_is_refused, equals("HTTP/1.1 400 Bad Request")),
    ),
    Difference(
        "times asked",
        "a call with a field that is for the router to judge, as the next rows say",
        "no engine is asked",
        "What is refused reaches no engine.",
        where(_is_refused, equals("0")),
    ),
    Difference(
        "body",
        "fields that choose where an engine fetches KV (`kv_transfer_params` and their like, also in "
        "`vllm_xargs`)",
        "an error that names the field",
        "A client would choose which host an engine reads from, and KV would cross a boundary of the fleet.",
        _any_of(
            _refuses("kv_transfer_params", _FETCHES),
            _refuses("vllm_xargs", _FETCHES, "vllm_xargs.kv_transfer_params"),
        ),
    ),
    Difference(
        "body",
        "fields that choose the rank that serves (`data_parallel_rank` and its like)",
        "an error that names the field",
        "The router chooses it, and `nvext.dp_rank` asks for one.",
        _refuses("data_parallel_rank", "which rank serves is the router's to say: use nvext.dp_rank"),
    ),
    Difference(
        "body",
        "fields of `nvext` that are misspelt, or stand next to it",
        "an error that names the field",
        "With a misspelt constraint KV would cross a boundary unnoticed.",
        _any_of(
            _refuses("nvext", "unknown field", "nvext.required_taint"),
            _refuses("worker_id", "belongs into nvext, as nvext.worker_id; elsewhere nothing reads it"),
        ),
    ),
    Difference(
        "body",
        "`cache_salt` on a route whose engines read none",
        "an error that names the field",
        "What it keeps apart would be shared.",
        _refuses("cache_salt", "engines read none on /v1/messages, and would share what it keeps apart"),
    ),
    Difference(
        "body",
        "a body over one of the [bounds](security.md): too long, too deep, too many values",
        "an error that names the field and the bound",
        "One caller's body must not hold up the others.",
        where(lambda call, alone: _is_refused(call, alone) and "metadata" in call.fields, _over_depth),
    ),
    Difference(
        "status",
        "a body that is compressed by gzip",
        "that of the same call without compression",
        "kvrouter inflates it. vLLM reads no compressed bodies.",
        where(_is_gzipped, _of_inflated),
    ),
    Difference(
        "body",
        "a body that is compressed by gzip",
        "that of the same call without compression",
        "kvrouter inflates it. vLLM reads no compressed bodies.",
        where(_is_gzipped, _of_inflated),
    ),
    Difference(
        "asked body",
        "a body that is compressed by gzip",
        "inflated",
        "vLLM reads no compressed bodies.",
        where(_is_gzipped, _of_inflated),
    ),
    Difference(
        "status",
        "`HEAD` of a page",
        "200",
        "Pages take HEAD where they take GET.",
        where(_is_head, equals("HTTP/1.1 200 OK")),
    ),
    Difference(
        "header allow",
        "`HEAD` of a page",
        "absent",
        "Pages take HEAD where they take GET.",
        where(_is_head, equals(None)),
    ),
    *(
        Difference(
            field,
            "`OPTIONS`",
            shown,
            "Browsers ask by it what they may send, and `--cors-origins` says to which pages' origins.",
            where(_is_options, equals(through)),
        )
        for field, shown, through in (
            ("status", "204", "HTTP/1.1 204 No Content"),
            ("header content-type", "absent", None),
            ("body", "empty", b""),
        )
    ),
    Difference(
        "header allow",
        "`OPTIONS`",
        "also names OPTIONS, and HEAD where the path takes GET",
        "That is what the path takes.",
        where(_is_options, _any_of(equals("OPTIONS, POST"), equals("GET, HEAD, OPTIONS"))),
    ),
)
