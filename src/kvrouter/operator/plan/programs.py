"""What a component's containers run: programs that can't register with kvrouter are named."""

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kvrouter.operator.api.deployment import ComponentType
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.operator.plan.pod import PodDraft
from kvrouter.operator.plan.serving import is_sidecar
from kvrouter.settings.problems import Path, Problem

WORDS_MAX = 4_096
"""So many words of a command are read; what comes after them says nothing about the program."""

ENGINE_LABEL = "kvrouter.dev/engine"
"""Label of pods whose engines a process elsewhere announces (``kvrouter worker pods``)."""


class Speaks(Enum):
    """How a program is known to a router, if at all."""

    KVROUTER = "kvrouter"
    """It is kvrouter; ``Program.name`` is its command."""
    DYNAMO = "Dynamo"
    """It registers by Dynamo's protocol alone."""
    HTTP = "HTTP"
    """It answers HTTP, and registers nowhere."""
    UNKNOWN = "unknown"


class Program(NamedTuple):
    """What a container runs. ``engine`` is the kind of kvrouter's worker for it, None where there is none."""

    speaks: Speaks
    name: str = ""
    engine: str | None = None


UNKNOWN = Program(Speaks.UNKNOWN)

_DYNAMO_MODULE = re.compile(r"dynamo\.([a-z_]+)(\.[a-z_]+)*")
_DYNAMO_PROGRAM = re.compile(r"dynamo(-run|-[a-z]+-sidecar)?")
_DYNAMO_IMAGE = re.compile(
    r"(.*/)?(ai-dynamo/.+|(vllm|sglang|trtllm|tensorrtllm)-runtime(-[a-z0-9-]+)?|dynamo-(frontend|planner|epp))"
)
_DYNAMO_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "tensorrtllm": "trtllm"}

_HTTP_PROGRAMS: dict[str, str | None] = {
    "vllm": "vllm",
    "vllm.entrypoints.openai.api_server": "vllm",
    "sglang": "sglang",
    "sglang.launch_server": "sglang",
    "trtllm-serve": "trtllm",
    "tritonserver": None,
    "text-generation-launcher": None,
    "lmdeploy": None,
    "llama-server": None,
    "ollama": None,
}
"""Servers of models by their program or Python module, and the kind of worker that announces each."""

_HTTP_IMAGES: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"(.*/)?(vllm|vllm-(openai|cpu|tpu|rocm)[a-z0-9-]*|rocm/vllm-dev)"), "vllm"),
    (re.compile(r"(.*/)?(sglang|lmsysorg/sglang-[a-z0-9-]+)"), "sglang"),
    (re.compile(r"(.*/)?(tensorrt-llm/release|tensorrt-llm|tensorrtllm)"), "trtllm"),
    (re.compile(r"nvcr\.io/nim/.+|(.*/)?(tritonserver|text-generation-inference|lmdeploy|ollama)"), None),
    (re.compile(r"(.*/)?llama\.cpp"), None),
)
"""Published images of servers of models, without their tags."""

_LABELS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def program_of(container: Manifest) -> Program:
    """Return what ``container`` runs: its command says so, else its image, else it is kvrouter's own."""
    command, args = _words(container.get("command")), _words(container.get("args"))
    words = words_of(container)
    image = container.get("image")
    if not command and not image:
        return Program(Speaks.KVROUTER, words[0] if words else "")
    named = _named(words)
    if named is not None:
        return named
    return UNKNOWN if command or not isinstance(image, str) else _of_image(image, args)


def words_of(container: Manifest) -> list[str]:
    """Return the words of a container's command and args, those of a shell's text in its place."""
    return [*_words(container.get("command")), *_words(container.get("args"))]


def _words(found: object) -> list[str]:
    """The words of ``command`` or ``args``, and those of a shell's text in their place."""
    words: list[str] = []
    for word in found if isinstance(found, list) else ():
        text = str(word)
        if any(blank in text for blank in " \n\t") and not text.lstrip().startswith(("{", "[")):
            words += _of_shell(text)
        else:
            words.append(text)
        if len(words) >= WORDS_MAX:
            break
    return words[:WORDS_MAX]


def _of_shell(text: str) -> list[str]:
    try:
        return shlex.split(text[: 16 * WORDS_MAX], comments=True)
    except ValueError:  # a quotation that does not end
        return text.split()


def _named(words: list[str]) -> Program | None:
    """The first of ``words`` that names a program; kvrouter's own worker wins, since it announces the pod."""
    found: Program | None = None
    for at, word in enumerate(words):
        program = word.rpartition("/")[2]
        after = words[at + 1] if at + 1 < len(words) else ""
        is_module = at > 0 and words[at - 1] == "-m"
        if program == "kvrouter" or (is_module and word in ("kvrouter", "kvrouter.cli")):
            if after == "worker" or found is None:
                found = Program(Speaks.KVROUTER, after)
            if after == "worker":
                return found
        elif found is None:
            found = _of_word(program, after, is_module=is_module, is_first=at == 0)
    return found


def _of_word(program: str, after: str, *, is_module: bool, is_first: bool) -> Program | None:
    module = _DYNAMO_MODULE.fullmatch(program) if is_module else None
    if module is not None:
        return Program(Speaks.DYNAMO, program, _DYNAMO_ENGINES.get(module[1]))
    of_dynamo = _DYNAMO_PROGRAM.fullmatch(program)
    if of_dynamo is not None and (of_dynamo[1] or after in ("serve", "run", "start")):
        return Program(Speaks.DYNAMO, program)
    if program not in _HTTP_PROGRAMS:
        return None
    runs = after in ("serve", "start") or "-" in program or "." in program or is_module or is_first
    return Program(Speaks.HTTP, program, _HTTP_PROGRAMS[program]) if runs else None


def _of_image(image: str, args: list[str]) -> Program:
    """What an image runs by itself."""
    name = _without_tag(image)
    of_dynamo = _DYNAMO_IMAGE.fullmatch(name)
    if of_dynamo is not None:
        return Program(Speaks.DYNAMO, image, _DYNAMO_ENGINES.get(of_dynamo[3] or _engine_in(name)))
    for pattern, engine in _HTTP_IMAGES:
        if pattern.fullmatch(name) is not None:
            return Program(Speaks.HTTP, image, engine)
    if name.rpartition("/")[2].startswith("kvrouter"):
        return Program(Speaks.KVROUTER, args[0] if args else "")
    return UNKNOWN


def _engine_in(name: str) -> str:
    return name.rpartition("/")[2].partition("-")[0]


def _without_tag(image: str) -> str:
    """``image`` without its digest and tag; a registry's port is no tag."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def unregistered(draft: PodDraft, kind: ComponentType) -> Iterator[Problem]:
    """Yield a warning for each container of a worker whose program can't register with kvrouter, and for
    what a frontend's container runs in place of kvrouter's frontend.
    """
    at: Path = (*draft.at, "spec", "containers")
    if kind is ComponentType.FRONTEND:
        if draft.containers:
            yield from _of_frontend(program_of(draft.main), (*at, draft.main_index))
        return
    main = (*at, draft.main_index)
    programs = {(*at, index): program_of(container) for index, container in enumerate(draft.containers)}
    for index, container in enumerate(draft.init_containers):
        if is_sidecar(container):
            programs[(*draft.at, "spec", "initContainers", index)] = program_of(container)
    registers = ENGINE_LABEL in draft.labels or any(_registers(each) for each in programs.values())
    for place, program in programs.items():
        is_alone = place == main and not registers and program.speaks is not Speaks.UNKNOWN
        if program.speaks is Speaks.DYNAMO or is_alone:
            yield Problem(place, _never(program))


def _registers(program: Program) -> bool:
    return program.speaks is Speaks.KVROUTER and program.name in ("", "worker")


def _never(program: Program) -> str:
    """Why a worker's program is never found, and what to write."""
    if program.speaks is Speaks.KVROUTER:
        return f"runs kvrouter {program.name}, which registers no worker: args begin with worker, and a kind"
    what = f"runs {_shown(program.name)}"
    if program.speaks is Speaks.DYNAMO:
        what += ", which speaks Dynamo's protocol and never registers here"
    else:
        what += ", which never registers"
    if program.engine is None:
        return f"{what}: use an engine that kvrouter has a worker for (kvrouter worker --help)"
    server = "it" if program.speaks is Speaks.HTTP else f"{_LABELS[program.engine]}'s server"
    args = f"[worker, {program.engine}, --url, URL]"
    return f"{what}: run {server} as a sidecar, main without an image: args {args}"


def _of_frontend(program: Program, at: Path) -> Iterator[Problem]:
    if program.speaks in (Speaks.DYNAMO, Speaks.HTTP):
        found = _shown(program.name)
        yield Problem(
            at, f"runs {found}, which finds none of kvrouter's workers: leave out image, command and args"
        )
    elif program.speaks is Speaks.KVROUTER and program.name == "worker":
        yield Problem(at, "runs kvrouter worker in a frontend: args begin with frontend")


NAME_CHARS_SHOWN = 32


def _shown(name: str) -> str:
    """The end of a program's or an image's name, short enough for the warnings of an API server."""
    name = name.rpartition("/")[2]
    return name if len(name) <= NAME_CHARS_SHOWN else f"{name[:NAME_CHARS_SHOWN]}…"
