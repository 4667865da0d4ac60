"""Bodies that would become a hundred times their size, and the field that each is refused for."""

from functools import partial
from typing import NamedTuple

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'

LONG_BODY_BYTES = 59_000_000
WIDE_BODY_BYTES = 15_000_000
"""Within the bound of text as it is written; with one wide character Python would hold four times that."""


class RefusedBody(NamedTuple):
    """A body, the path that refuses it, and the field that the refusal names, if it names one."""

    path: str
    body: bytes
    param: str | None


def filled(head: bytes, item: bytes, tail: bytes, *, size_bytes: int) -> bytes:
    """A body of about this size: ``item`` again and again between its two ends."""
    return head + item * ((size_bytes - len(head) - len(tail)) // len(item)) + tail


def said(item: bytes, tail: bytes, *, size_bytes: int) -> bytes:
    """A chat of one message, filled."""
    head = b'{"model":"mock","messages":[{"role":"user","content":"'
    return filled(head, item, tail, size_bytes=size_bytes)


def blank_bodies(size_bytes: int) -> dict[str, RefusedBody]:
    """Bodies of about this size that are blanks but for a few bytes."""
    fill = partial(filled, size_bytes=size_bytes)
    chat = partial(_chat, size_bytes=size_bytes)
    return {
        "blanks before the body": RefusedBody(
            CHAT, fill(b"", b" ", b'{"model":"mock","n":2,' + MESSAGES + b"}"), None
        ),
        "blanks behind the body": RefusedBody(
            CHAT, fill(b'{"model":"mock","n":2,' + MESSAGES + b"}", b" ", b""), None
        ),
        "blanks in an object": RefusedBody(CHAT, chat(b'"nvext":{', b" ", b'"a":1}}'), "nvext"),
        "blanks before a message": RefusedBody(
            CHAT,
            fill(b'{"model":"mock","messages":[', b"\n", b'{"role":7,"content":"hi"}]}'),
            "messages",
        ),
        "blanks in a message": RefusedBody(
            CHAT,
            fill(b'{"model":"mock","n":2,"messages":[{', b"\t", b'"role":"user","content":"hi"}]}'),
            "messages[0]",
        ),
        "many short runs of blanks": RefusedBody(
            COMPLETION,
            fill(b'{"model":"mock","prompt":[', b" " * 60_000 + b"1,", b"1]}"),
            "prompt",
        ),
        "blanks before a list of lists": RefusedBody(
            COMPLETION,
            fill(b'{"model":"mock","prompt":[', b" ", b"[[1]]]}"),
            None,
        ),
        "blanks in a list of lists": RefusedBody(
            COMPLETION, fill(b'{"model":"mock","prompt":[[', b" ", b"[1]]]}"), None
        ),
        "blanks behind a list": RefusedBody(
            COMPLETION, fill(b'{"model":"mock","prompt":[[1]', b" ", b"]}"), "prompt"
        ),
    }


def refused_bodies(size_bytes: int) -> dict[str, RefusedBody]:
    """One body of each kind, by the kind's name: of about this size, where the kind has none of its own."""
    fill = partial(filled, size_bytes=size_bytes)
    say = partial(said, size_bytes=size_bytes)
    chat = partial(_chat, size_bytes=size_bytes)
    return {
        "a number that is none": RefusedBody(
            CHAT,
            say(b"a", b'"}],"temperature":NaN}', size_bytes=LONG_BODY_BYTES),
            "temperature",
        ),
        **blank_bodies(size_bytes),
        "blanks within the bounds": RefusedBody(
            CHAT,
            fill(
                b'{"model":"mock","messages":[' + b"{}," * 65,
                b" " * 60_000 + b"{},",
                b'{"role":7}]}',
                size_bytes=4_100_000,
            ),
            "messages[0].role",
        ),
        "empty messages": RefusedBody(
            CHAT, fill(b'{"model":"mock","messages":[', b"{},", b"{}]}"), "messages"
        ),
        "empty prompts": RefusedBody(
            COMPLETION, fill(b'{"model":"mock","prompt":[', b"[],", b"[]]}"), "prompt"
        ),
        "token ids": RefusedBody(COMPLETION, fill(b'{"model":"mock","prompt":[', b"1,", b"1]}"), "prompt"),
        "tools": RefusedBody(CHAT, chat(b'"tools":[', b"{},", b"{}]}"), "tools"),
        "stops": RefusedBody(CHAT, chat(b'"stop":[', b'"",', b'""]}'), "stop"),
        "biases": RefusedBody(CHAT, chat(b'"logit_bias":{', b'"1":1,', b'"1":1}}'), "logit_bias"),
        "taints": RefusedBody(
            CHAT,
            chat(b'"nvext":{"routing_constraints":{"required_taints":[', b'"a",', b'"a"]}}}'),
            "nvext.routing_constraints.required_taints",
        ),
        "a word that is none": RefusedBody(
            CHAT,
            chat(b'"nvext":{"router_config_override":{"router_mode":"', b"a", b'"}}}'),
            "nvext.router_config_override.router_mode",
        ),
        "lists inside each other": RefusedBody(CHAT, chat(b'"tools":', b"[", b""), None),
        "a number without end": RefusedBody(CHAT, chat(b'"seed":', b"1", b"}"), "seed"),
        "a name without end": RefusedBody(CHAT, chat(b'"metadata":{"', b"a", b'":1}}'), "metadata"),
        "escapes": RefusedBody(CHAT, say(b"\\u6f22", b'"}]}'), "messages"),
        "one wide character": RefusedBody(CHAT, say(b"a", '😀"}]}'.encode()), "messages"),
        "one wide character in a shorter text": RefusedBody(
            CHAT,
            say(b"a", '😀"}]}'.encode(), size_bytes=WIDE_BODY_BYTES),
            "messages",
        ),
        "one wide character within the bounds": RefusedBody(
            CHAT,
            say(b"a", '😀"}]}'.encode(), size_bytes=4_000_000),
            "messages",
        ),
        "one wide character in another field": RefusedBody(
            CHAT,
            fill(
                b'{"model":"mock",' + MESSAGES + b',"stop":"',
                b"a",
                '😀"}'.encode(),
                size_bytes=WIDE_BODY_BYTES,
            ),
            "stop",
        ),
        "one wide character for nobody's model": RefusedBody(
            CHAT,
            fill(
                b'{"model":"nobody","messages":[{"role":"user","content":"',
                b"a",
                '😀"}]}'.encode(),
                size_bytes=4_000_000,
            ),
            "model",
        ),
        "letters": RefusedBody(CHAT, say(b"a", b'"}]}'), "messages"),
        "letters within the bounds and two answers": RefusedBody(
            CHAT,
            say(b"a", b'"}],"n":2}', size_bytes=990_000),
            "n",
        ),
        "calls in a string": RefusedBody(
            CHAT,
            fill(
                b'{"model":"mock","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f",'
                b'"arguments":"{\\"a\\":[',
                b"[],",
                b'[]]}"}}]}]}',
            ),
            "messages",
        ),
    }


def _chat(field: bytes, item: bytes, tail: bytes, *, size_bytes: int) -> bytes:
    return filled(b'{"model":"mock",' + MESSAGES + b"," + field, item, tail, size_bytes=size_bytes)
