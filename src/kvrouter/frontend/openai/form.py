"""Forms with files: reads their short fields, and the position of the model's name.

The parser is Starlette's, which vLLM and SGLang use too, so that fields are the same for both. It is not made
for long hostile bodies; inputs that would take it much time are refused first.
"""

import logging
import re
from collections.abc import Mapping
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvrouter.core.errors import InvalidRequest

# It warns about every wrong body: clients could fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

PARTS_MAX = 64
"""The most fields and files of a form."""

FIELD_MAX_BYTES = 64 * 1024
"""The longest field that is not a file, such as the prompt of a transcription."""

NAME_MAX_BYTES = 256
"""The longest name of a field."""

PART_HEADERS_MAX = 8
PART_HEADER_MAX_BYTES = 4096
"""The most headers of a part, and the longest header."""

BOUNDARY_MAX_BYTES = 70
"""The longest boundary, by RFC 2046."""

CONTENT_TYPE = b"multipart/form-data"

_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PADDING = rb"[ \t]{16}"
"""RFC 2046 allows any number of blanks after a boundary, and the parser handles each one by one."""


class UnsupportedMediaType(InvalidRequest):
    """The body has a content type that the route does not take."""

    status_hint = 415
    code = "unsupported_media_type"


class Form(NamedTuple):
    """A form: its bytes and content type, its fields that are not files, and the position of each value."""

    data: bytes
    content_type: str
    fields: Mapping[str, str]
    spans: Mapping[str, tuple[int, int]]

    def text(self, name: str, default: str) -> str:
        """Return the value of a field, or ``default``."""
        return self.fields.get(name, default)


def read_form(content_type: str, data: bytes) -> Form:
    """Read a form. Raises :class:`UnsupportedMediaType`, and :class:`InvalidRequest` naming the field."""
    boundary = _boundary_of(content_type)
    separator = b"\r\n--" + boundary
    if data.count(separator) > PARTS_MAX:
        raise InvalidRequest(f"the form has more than {PARTS_MAX} parts")
    if re.search(re.escape(separator) + _PADDING, data) is not None:
        raise InvalidRequest("the form has many blanks behind a boundary")
    parts = _Parts()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": parts.begin,
            "on_header_field": parts.header_name,
            "on_header_value": parts.header_value,
            "on_header_end": parts.header_end,
            "on_headers_finished": parts.named,
            "on_part_data": parts.value,
            "on_part_end": parts.end,
            "on_end": parts.finish,
        },
        max_header_count=PART_HEADERS_MAX,
        max_header_size=PART_HEADER_MAX_BYTES,
    )
    try:
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the body is no form: {error}") from None
    if not parts.is_complete:
        raise InvalidRequest("the form is not whole: its last boundary is missing")
    return Form(data, f'{CONTENT_TYPE.decode()}; boundary="{boundary.decode()}"', parts.fields, parts.spans)


def _boundary_of(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type.encode("latin-1"))
    if kind != CONTENT_TYPE:
        raise UnsupportedMediaType(
            f"content-type: this route takes {CONTENT_TYPE.decode()}, with a file", param="content-type"
        )
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise UnsupportedMediaType("content-type: a form's charset must be UTF-8", param="content-type")
    boundary = options.get(b"boundary", b"")
    if len(boundary) > BOUNDARY_MAX_BYTES or _BOUNDARY.fullmatch(boundary) is None:
        raise InvalidRequest("content-type: no boundary that separates parts", param="content-type")
    return boundary


class _Parts:
    """Collects the parser's callbacks: fields, and positions of their values."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.is_complete = False
        self.begin()

    def begin(self) -> None:
        self._header = b""
        self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._span: tuple[int, int] | None = None
        self._value = b""

    def header_name(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def header_value(self, data: bytes, begin: int, end: int) -> None:
        self._header_value += data[begin:end]

    def header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def named(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if name is None or len(name) > NAME_MAX_BYTES:
            raise InvalidRequest(f"a part of the form has no name, or one over {NAME_MAX_BYTES} bytes")
        self._name = _text(name)
        self._is_file = b"filename" in options
        if self._name == "model" and self._is_file:
            raise InvalidRequest("model: must be a text, and no file", param="model")

    def value(self, data: bytes, begin: int, end: int) -> None:
        if self._is_file:
            return
        if end - begin > FIELD_MAX_BYTES:
            raise InvalidRequest(f"{self._name}: is over {FIELD_MAX_BYTES} bytes", param=self._name)
        self._span, self._value = (begin, end), data[begin:end]

    def end(self) -> None:
        if self._is_file:
            return
        if self._name in _READ and self._name in self.fields:
            raise InvalidRequest(f"{self._name}: is in the form twice", param=self._name)
        self.fields[self._name] = _text(self._value)
        if self._span is not None:
            self.spans[self._name] = self._span

    def finish(self) -> None:
        self.is_complete = True


_READ = frozenset({"model", "stream"})
"""Fields that the router reads; a repeated one is refused, because the engine may take the other value."""


def _text(value: bytes) -> str:
    """Return a decoded text as Starlette reads it: UTF-8, else Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
