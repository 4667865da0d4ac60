"""Forms with files: what is read of them, where, and what of hostile ones is refused before it costs time."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.openai.form import (
    FIELD_MAX_BYTES,
    NAME_MAX_BYTES,
    PART_HEADER_MAX_BYTES,
    PART_HEADERS_MAX,
    PARTS_MAX,
    UnsupportedMediaType,
    read_form,
)

TYPE = "multipart/form-data; boundary=b"


def part(name: str, value: bytes | str, more: str = "") -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


AUDIO = part("file", bytes(range(256)) * 300, '; filename="a.wav"\r\nContent-Type: audio/wav')


def test_form_fields_are_read_with_their_positions() -> None:
    data = form(part("model", "tiny"), AUDIO, part("prompt", "é\r\n--"), part("stream", ""))
    read = read_form(TYPE, data)
    assert read.fields == {"model": "tiny", "prompt": "é\r\n--", "stream": ""}
    begin, end = read.spans["model"]
    assert data[begin:end] == b"tiny"
    assert read.data is data
    assert "stream" not in read.spans


@pytest.mark.parametrize(
    ("content_type", "kind", "what"),
    [
        ("", UnsupportedMediaType, "this route takes"),
        ("application/json", UnsupportedMediaType, "this route takes"),
        ("application/x-www-form-urlencoded", UnsupportedMediaType, "this route takes"),
        ("multipart/mixed; boundary=b", UnsupportedMediaType, "this route takes"),
        (f"{TYPE}; charset=utf-16", UnsupportedMediaType, "charset"),
        ("multipart/form-data", InvalidRequest, "boundary"),
        ("multipart/form-data; boundary=", InvalidRequest, "boundary"),
        (f"multipart/form-data; boundary={'b' * 71}", InvalidRequest, "boundary"),
        ('multipart/form-data; boundary="a\tb"', InvalidRequest, "boundary"),
        ("multipart/form-data; boundary=é", InvalidRequest, "boundary"),
    ],
)
def test_another_content_type_is_refused(content_type: str, kind: type[InvalidRequest], what: str) -> None:
    with pytest.raises(kind, match=what) as refused:
        read_form(content_type, form(AUDIO))
    assert refused.value.param == "content-type"


def test_the_content_type_is_forwarded_normalized() -> None:
    for sent in (TYPE, 'Multipart/Form-Data; x=y; boundary="b"', f"{TYPE}; charset=UTF-8"):
        assert read_form(sent, form(AUDIO)).content_type == 'multipart/form-data; boundary="b"'


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not whole"),
        (b"no form", "no form"),
        (form(AUDIO)[:-6], "not whole"),
        (form(AUDIO)[:300], "not whole"),
        (form(b"--b\r\nno header\r\n\r\nx\r\n"), "no form"),
        (form(b"--b\r\n\r\nx\r\n"), "no name"),
        (form(b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n"), "no name"),
        (form(part("a" * (NAME_MAX_BYTES + 1), "x")), "no name"),
        (form(*(part("x", "") for _ in range(PARTS_MAX + 2))), f"more than {PARTS_MAX} parts"),
        (form(part("x", "", "\r\na: b" * PART_HEADERS_MAX)), "no form"),
        (form(part("x", "", f"\r\na: {'b' * PART_HEADER_MAX_BYTES}")), "no form"),
        (form(part("prompt", "x" * (FIELD_MAX_BYTES + 1))), "prompt: is over"),
        (form(part("model", "a"), part("model", "b")), "model: is in the form twice"),
        (form(part("stream", "true"), part("stream", "false")), "stream: is in the form twice"),
        (form(part("model", "a", '; filename="x"')), "model: must be a text"),
    ],
)
def test_an_invalid_form_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        read_form(TYPE, data)


LONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "boundaries": (lambda: form(part("x", b"\r\n--bx" * 10_000_000)), "more than 64 parts"),
    "blanks behind one": (lambda: form(part("x", "y"))[:-7] + b"--b" + b" " * 60_000_000, "many blanks"),
    "empty lines before it": (lambda: b"\r\n" * 30_000_000, "not whole"),
    "a header's name": (lambda: b"--b\r\n" + b"x" * 60_000_000, "no form"),
    "a header's blanks": (lambda: b"--b\r\nx: " + b" " * 60_000_000, "no form"),
    "half boundaries": (lambda: form(part("x", b"\r\n--" * 15_000_000)), "x: is over"),
}


@pytest.mark.parametrize("what", LONG)
def test_a_long_hostile_body_is_refused_quickly(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, why = LONG[what]
    data = make()
    n_lines = 0

    def count(*_: Any) -> Any:
        nonlocal n_lines
        n_lines += 1
        assert n_lines < 100_000, "the parser goes through the body byte by byte"
        return count

    sys.settrace(count)
    try:
        with pytest.raises(InvalidRequest, match=why):
            read_form(TYPE, data)
    finally:
        sys.settrace(None)


async def _starlettes(data: bytes) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield data

    parser = MultiPartParser(Headers({"content-type": TYPE}), stream())
    try:
        return dict((await parser.parse()).items())
    finally:
        for file in parser._files_to_close_on_error:  # also of a part that does not end
            file.close()


PIECES = st.sampled_from(
    [
        *(
            b"--b",
            b"\r\n",
            b"--",
            b"\r",
            b"\n",
            b"\r\n\r\n",
            b"tiny",
            b": ",
            b" ",
            b"-",
            b"x",
            b'name="model"',
        ),
        b'Content-Disposition: form-data; name="model"',
        b'content-disposition: form-data; name="a"; filename="model"',
    ]
)
HEAD = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map(b"".join))
def test_accepted_forms_have_the_fields_that_starlette_reads(middle: bytes) -> None:
    """Whatever is accepted: else a call could be routed as one model's and served as another's."""
    data = form(part("prompt", "p"), HEAD + middle + b"\r\n")
    try:
        read = read_form(TYPE, data)
    except InvalidRequest:
        return
    try:
        seen = asyncio.run(_starlettes(data))
    except MultiPartException:
        return
    assert read.fields == {name: value for name, value in seen.items() if isinstance(value, str)}
