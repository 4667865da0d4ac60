"""A fast encoder, for tokenizers for which it gives the same ids as ``tokenizers`` (decision note 0029)."""

import os
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import product
from threading import Lock
from weakref import WeakValueDictionary

from tokenizers import Tokenizer as Backend

from kvrouter.core.requests import TokenBuffer

FAST_ENCODERS_MAX = 4
"""The most in a process. fastokens keeps caches of four for each thread: with a fifth, each change from one
to another would copy megabytes.
"""

FAST_TEXT_CHARS_MAX = 262_144
"""The longest text that a fast encoder takes. Words can be made whose hashes are equal in the cache of
fastokens, and the time of a text grows with their number's square: here 2 s, and 12 s for three times that.
"""

TEXT_CPU_S, CHAR_CPU_S = 1e-3, 0.5e-6
"""More processor time than any text takes whose words are not made to be slow (0.2 µs a character at most);
what an encode takes beyond ``TEXT_CPU_S`` and ``CHAR_CPU_S`` a character is its excess.
"""

EXCESS_S_MAX, EXCESS_DRAINED_PER_S = 0.5, 1e-3
"""An encoder with more excess is stopped. What is ordinary stays below: up to 0.1 s of a thread's first text,
and 30, 58 and 119 ms once each when its cache of words grows.
"""

REFUSED_MAX, WHY_CHARS_MAX = 1024, 500
"""The most refusals that are remembered, and the most characters of one."""

ADDED_TOKENS_CHECKED = 100
VOCABULARY_SAMPLES = 64

TEXTS = (
    "I'm sure they'LL say it's 'So', don't you? naïve façade Straße Łódź ſ İstanbul",
    "Ελληνικά κείμενα, ὕδωρ · Русский текст, ещё Ёж; Українська · Հայերեն · ქართული ᲥᲐᲠᲗᲣᲚᲘ",
    "نص عربي، ١٢٣٤ كتابٌ · עִבְרִית עם ניקוד · فارسی می‌روم ۱۲۳ · اردو",
    "हिन्दी पाठ क्षत्रिय १२३ · বাংলা লেখা · தமிழ் உரை · తెలుగు · ಕನ್ನಡ · മലയാളം · සිංහල · ગુજરાતી",
    "ภาษาไทย ๑๒๓ · ພາສາລາວ · ភាសាខ្មែរ · မြန်မာဘာသာ · བོད་ཡིག · አማርኛ · ᏣᎳᎩ · ᠮᠣᠩᠭᠣᠯ · ᐃᓄᒃᑎᑐᑦ",
    "中文文本，简体和繁體。日本語のテキスト、カタカナ ｶﾅ 々〆",
    "한국어 텍스트 \u1112\u1161\u11ab · Tiếng Việt · e\u0301 o\u0308\u0323 \u0344 \U0001d160 ½ Ⅷ ² ₃ ﬁ ﷺ",
    "🙂👩\u200d👩\u200d👧 🇩🇪🏳️\u200d🌈 👍🏽 ♥️ ＡＢＣ１２３ 𝔘𝔫𝔦 𐍈 𓀀 𠀀",
    "a\u00a0b\u3000c\u2003d\u200be\u2028f\u2029g\x85h\x0bi\x0cj\x1ck\x00l\ufeffm\ufffdn\ufffeo\ue000p\u00adq\x7fr",
    "def f(x: int = 0x1F) -> dict[str, float]:\n\treturn {**a, 'k': -1.5e-10}  # why\r\n\r\n\n    }\n",
    '{"a": [1, 22, 333, 4444, 55555, 1234567890], "b": null}\n<html><p class="x">&amp;</p></html>',
    "https://example.com/a_b/c-d?e=%20f#g user@host:~$ ls -la | grep 'x' >> /dev/null 2>&1 && echo $?",
    "CamelCaseWORDS snake_case McDONALD's O'Neil \"\" ... !!! ?!?! -- --- == === ((())) [[]] $€£¥ №",
)
SPACES = ("", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", " \n ")
RUNS = ("a", "Ab", " ", "\n", "=", "-", "7", "漢", "🙂", "é", "\u0301", " a")
RUN_LENGTHS = (7, 15, 16, 17, 33, 257, 1025)
LONG_RUNS = tuple(run * length for length in (16_384, 65_536, FAST_TEXT_CHARS_MAX) for run in "a7 ")
"""Texts that meet a limit of a regular expression, or the square of a length, where it has one."""


class FastEncoder:
    """fastokens with one ``tokenizer.json``. Thread-safe; raises ValueError for one that it does not read.

    Once texts took much longer than their length explains, or one was refused, ``why_stopped`` says so, and
    ``on_stop``, one for each user's name, are called with it, in any thread. Nobody encodes with it then.
    """

    def __init__(self, written: str) -> None:
        # By default a long text is cut up among as many threads as there are cores, each with its own cache.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        from fastokens import Tokenizer  # noqa: PLC0415 - most commands encode nothing

        self._native = Tokenizer.from_json_str(written)
        self._native.no_truncation()
        self.why_stopped: str | None = None
        self.on_stop: dict[str, Callable[[str], None]] = {}
        self._lock = Lock()
        self._excess_s = self._excess_at_s = 0.0

    def encode(self, text: str, *, reads_specials: bool = True) -> TokenBuffer:
        """Return the ids of ``text`` without additions. Releases the GIL. ValueError for half a surrogate
        pair, and for a text beyond a limit of its regular expressions.
        """
        start_s = time.thread_time()
        try:
            ids, _ = self._native.encode_batch_flat([text], split_special_tokens=not reads_specials)
        except UnicodeEncodeError:
            raise
        except ValueError as error:
            self._stop(f"fastokens refuses a text: {error}")
            raise
        excess_s = time.thread_time() - start_s - TEXT_CPU_S - CHAR_CPU_S * len(text)
        if excess_s > 0:
            self._add_excess(excess_s)
        return array("I", ids)

    def forget_excess(self) -> None:
        """Forget what texts took so far: the check at load fills caches that end with its thread."""
        self._excess_s = 0.0

    def _add_excess(self, excess_s: float) -> None:
        with self._lock:
            now_s = time.monotonic()
            drained_s = EXCESS_DRAINED_PER_S * (now_s - self._excess_at_s)
            self._excess_s = max(0.0, self._excess_s - drained_s) + excess_s
            self._excess_at_s = now_s
            stops = self._excess_s > EXCESS_S_MAX
        if stops:
            self._stop("texts took much longer than their length explains")

    def _stop(self, why: str) -> None:
        with self._lock:
            if self.why_stopped is not None:
                return
            self.why_stopped = why[:WHY_CHARS_MAX]
        for call in list(self.on_stop.values()):
            call(self.why_stopped)


class FastEncoderRefused(Exception):
    """A tokenizer has no fast encoder; the message says why."""


_encoders: WeakValueDictionary[bytes, FastEncoder] = WeakValueDictionary()
_refused: dict[bytes, str] = {}
_lock = Lock()


def fast_encoder(backend: Backend) -> FastEncoder:
    """Return the fast encoder of ``backend``; equal ones share it.

    Raises FastEncoderRefused where fastokens does not read it, gives other ids for a text of :func:`samples`,
    is slow for or refuses one of :data:`LONG_RUNS`, was stopped, or has :data:`FAST_ENCODERS_MAX` others.
    """
    # Not the file's own text: the ids there of added tokens may be others, and fastokens makes a table as
    # long as the highest.
    written = backend.to_str()
    key = sha256(written.encode()).digest()
    with _lock:
        if key in _refused:
            raise FastEncoderRefused(_refused[key])
        encoder = _encoders.get(key)
        if encoder is not None:
            return encoder
        if len(_encoders) >= FAST_ENCODERS_MAX:
            raise FastEncoderRefused(f"{FAST_ENCODERS_MAX} other tokenizers have fast encoders")
        try:
            encoder = _checked_encoder(backend, written)
        except FastEncoderRefused as refused:
            _refuse_from_now(key, str(refused))
            raise
        encoder.on_stop[""] = partial(_refuse_from_now, key)
        _encoders[key] = encoder
        return encoder


def _refuse_from_now(key: bytes, why: str) -> None:
    if len(_refused) < REFUSED_MAX:
        _refused[key] = why[:WHY_CHARS_MAX]


def _checked_encoder(backend: Backend, written: str) -> FastEncoder:
    for token in backend.get_added_tokens_decoder().values():
        if token.single_word or ((token.lstrip or token.rstrip) and not token.content.strip()):
            raise FastEncoderRefused(f"fastokens may find the added token {token.content[:80]!r} elsewhere")
    try:
        encoder = FastEncoder(written)
    except ValueError as error:
        raise FastEncoderRefused(f"fastokens does not read it: {error}") from error
    with ThreadPoolExecutor(1) as thread:  # the caches of a thread end with it
        thread.submit(_check, backend, encoder).result()
    encoder.forget_excess()
    return encoder


def _check(backend: Backend, encoder: FastEncoder) -> None:
    try:
        text = first_difference(backend, encoder)
        if text is not None:
            raise FastEncoderRefused(f"fastokens gives other ids for {text[:80]!r}")
        for text in LONG_RUNS:
            encoder.encode(text)
            if encoder.why_stopped is not None:
                break
    except FastEncoderRefused:
        raise
    except Exception as error:  # tokenizers raises no narrower one, for a text without tokens
        raise FastEncoderRefused(encoder.why_stopped or f"the check failed: {error}") from error
    if encoder.why_stopped is not None:
        raise FastEncoderRefused(encoder.why_stopped)


def first_difference(backend: Backend, encoder: FastEncoder) -> str | None:
    """Return the first of :func:`samples` for which ``encoder`` gives other ids than ``backend``."""
    try:
        for reads_specials, texts in ((True, samples(backend)), (False, _added_token_samples(backend))):
            backend.encode_special_tokens = not reads_specials
            for text in texts:
                (expected,) = backend.encode_batch_fast([text], add_special_tokens=False)
                if encoder.encode(text, reads_specials=reads_specials).tolist() != expected.ids:
                    return text
    finally:
        backend.encode_special_tokens = False
    return None


def samples(backend: Backend) -> Iterator[str]:
    """Yield some 600 texts: scripts, code, spaces, runs, added tokens, and each token of the vocabulary."""
    for text in TEXTS:
        yield from (text, text.upper(), text.replace(" ", "\n"), text.replace(" ", ""), f"  {text} \n" * 3)
    for before, between, after in product(SPACES[:5], SPACES, SPACES):
        yield f"{before}x{between}1{after}"
    yield from (f"x{run * length}y" for run in RUNS for length in RUN_LENGTHS)
    yield from _added_token_samples(backend)
    ids = sorted(backend.get_vocab().values())
    for first in range(VOCABULARY_SAMPLES):
        yield backend.decode(ids[first::VOCABULARY_SAMPLES], skip_special_tokens=False)


def _added_token_samples(backend: Backend) -> Iterator[str]:
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    chosen = added[:: len(added) // ADDED_TOKENS_CHECKED + 1]
    for token in chosen:
        yield f"{token}user\n{token}{token} é{token}漢 {token}\n {token[:-1]} {token.upper()}"
    yield "".join(chosen)
