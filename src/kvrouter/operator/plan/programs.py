"""Recognises the programs that a component's containers run, and warns of those that cannot register."""

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kvrouter.core.workers import Role
from kvrouter.operator.api.deployment import ComponentType
from kvrouter.operator.plan.containers import flag_of, is_sidecar
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.operator.plan.pod_template import PodDraft
from kvrouter.settings.problems import Path, Problem

ARGUMENTS_MAX = 4_096
"""How many arguments of a command are read; the later ones do not name the program."""

ENGINE_LABEL = "kvrouter.dev/engine"
"""Label of pods with engines that another process announces (``kvrouter worker pods``)."""


class ProgramProtocol(Enum):
    """The protocol by which a router knows a program."""

    KVROUTER = "kvrouter"
    """It is kvrouter; ``Program.name`` is its command."""
    DYNAMO = "Dynamo"
    """It registers by Dynamo's protocol only."""
    HTTP = "HTTP"
    """It answers HTTP, and does not register."""
    UNKNOWN = "unknown"


class Program(NamedTuple):
    """The program of a container. ``engine`` is the kind of kvrouter's worker for it, None without one."""

    protocol: ProgramProtocol
    name: str = ""
    engine: str | None = None


UNKNOWN = Program(ProgramProtocol.UNKNOWN)

_DYNAMO_MODULE = re.compile(r"dynamo\.([a-z_]+)(\.[a-z_]+)*")
_DYNAMO_PROGRAM = re.compile(r"dynamo(-run|-[a-z]+-sidecar)?")
_DYNAMO_IMAGE = re.compile(
    r"(.*/)?(ai-dynamo/.+|(vllm|sglang|trtllm|tensorrtllm)-runtime(-[a-z0-9-]+)?|dynamo-(frontend|planner|epp))"
)
DYNAMO_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "tensorrtllm": "trtllm"}

HTTP_PROGRAMS: dict[str, str | None] = {
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
"""Model servers by program or Python module, and the kind of worker that announces each."""

HTTP_IMAGES: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"(.*/)?(vllm|vllm-(openai|cpu|tpu|rocm)[a-z0-9-]*|rocm/vllm-dev)"), "vllm"),
    (re.compile(r"(.*/)?(sglang|lmsysorg/sglang-[a-z0-9-]+)"), "sglang"),
    (re.compile(r"(.*/)?(tensorrt-llm/release|tensorrt-llm|tensorrtllm)"), "trtllm"),
    (re.compile(r"nvcr\.io/nim/.+|(.*/)?(tritonserver|text-generation-inference|lmdeploy|ollama)"), None),
    (re.compile(r"(.*/)?llama\.cpp"), None),
)
"""Published images of model servers, without their tags."""

ENGINE_LABELS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""The names in messages of the kinds in the tables above."""


def program_of(container: Manifest) -> Program:
    """Return the program of ``container``, by its command, else by its image, else kvrouter's own."""
    command, args = _arguments(container.get("command")), _arguments(container.get("args"))
    arguments = arguments_of(container)
    image = container.get("image")
    if not command and not image:
        return Program(ProgramProtocol.KVROUTER, arguments[0] if arguments else "")
    named = _named(arguments)
    if named is not None:
        return named
    return UNKNOWN if command or not isinstance(image, str) else _of_image(image, args)


def arguments_of(container: Manifest) -> list[str]:
    """Return the arguments in a container's command and args; the text of a shell is split."""
    return [*_arguments(container.get("command")), *_arguments(container.get("args"))]


def _arguments(found: object) -> list[str]:
    """Return the arguments in ``command`` or ``args``; the text of a shell is split."""
    arguments: list[str] = []
    for arg in found if isinstance(found, list) else ():
        text = str(arg)
        if any(blank in text for blank in " \n\t") and not text.lstrip().startswith(("{", "[")):
            arguments += _of_shell(text)
        else:
            arguments.append(text)
        if len(arguments) >= ARGUMENTS_MAX:
            break
    return arguments[:ARGUMENTS_MAX]


def _of_shell(text: str) -> list[str]:
    try:
        return shlex.split(text[: 16 * ARGUMENTS_MAX], comments=True)
    except ValueError:  # a quotation that does not end
        return text.split()


def _named(arguments: list[str]) -> Program | None:
    """Return the first program among ``arguments``; kvrouter's worker wins, since it announces the pod."""
    found: Program | None = None
    for at, arg in enumerate(arguments):
        program = arg.rpartition("/")[2]
        after = arguments[at + 1] if at + 1 < len(arguments) else ""
        is_module = at > 0 and arguments[at - 1] == "-m"
        if program == "kvrouter" or (is_module and arg in ("kvrouter", "kvrouter.cli")):
            if after == "worker" or found is None:
                found = Program(ProgramProtocol.KVROUTER, after)
            if after == "worker":
                return found
        elif found is None:
            found = _of_argument(program, after, is_module=is_module, is_first=at == 0)
    return found


def _of_argument(program: str, after: str, *, is_module: bool, is_first: bool) -> Program | None:
    module = _DYNAMO_MODULE.fullmatch(program) if is_module else None
    if module is not None:
        return Program(ProgramProtocol.DYNAMO, program, DYNAMO_ENGINES.get(module[1]))
    of_dynamo = _DYNAMO_PROGRAM.fullmatch(program)
    if of_dynamo is not None and (of_dynamo[1] or after in ("serve", "run", "start")):
        return Program(ProgramProtocol.DYNAMO, program)
    if program not in HTTP_PROGRAMS:
        return None
    runs = after in ("serve", "start") or "-" in program or "." in program or is_module or is_first
    return Program(ProgramProtocol.HTTP, program, HTTP_PROGRAMS[program]) if runs else None


def _of_image(image: str, args: list[str]) -> Program:
    """Return the program that an image runs by default."""
    name = _without_tag(image)
    of_dynamo = _DYNAMO_IMAGE.fullmatch(name)
    if of_dynamo is not None:
        return Program(ProgramProtocol.DYNAMO, image, DYNAMO_ENGINES.get(of_dynamo[3] or _engine_in(name)))
    for pattern, engine in HTTP_IMAGES:
        if pattern.fullmatch(name) is not None:
            return Program(ProgramProtocol.HTTP, image, engine)
    if name.rpartition("/")[2].startswith("kvrouter"):
        return Program(ProgramProtocol.KVROUTER, args[0] if args else "")
    return UNKNOWN


def _engine_in(name: str) -> str:
    return name.rpartition("/")[2].partition("-")[0]


def _without_tag(image: str) -> str:
    """Return ``image`` without its digest and tag; a registry's port is no tag."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def unregistered(draft: PodDraft, kind: ComponentType) -> Iterator[Problem]:
    """Yield a warning for each worker container with a program that cannot register with kvrouter, and for a
    frontend container that runs another program than kvrouter's frontend.
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
        is_alone = place == main and not registers and program.protocol is not ProgramProtocol.UNKNOWN
        if program.protocol is ProgramProtocol.DYNAMO or is_alone:
            yield Problem(place, _never(program))


def role_problems(draft: PodDraft, kind: ComponentType) -> Iterator[Problem]:
    """Yield a problem for each container of a prefill component that runs a decode worker, or the reverse."""
    legs = (Role.PREFILL, Role.DECODE)
    for name, containers in (("containers", draft.containers), ("initContainers", draft.init_containers)):
        for index, container in enumerate(containers):
            role = flag_of(container, "--role")
            is_other_leg = kind.role in legs and role in legs and role != kind.role
            if not is_other_leg or not _registers(program_of(container)):
                continue
            must = f"--role {role} contradicts the component's type {kind}: write --role {kind.role}"
            yield Problem((*draft.at, "spec", name, index, "args"), must)


def _registers(program: Program) -> bool:
    return program.protocol is ProgramProtocol.KVROUTER and program.name in ("", "worker")


def _never(program: Program) -> str:
    """Return why a worker's program is never found, and what to write."""
    if program.protocol is ProgramProtocol.KVROUTER:
        return f"runs kvrouter {program.name}, which registers no worker: args begin with worker, and a kind"
    what = f"runs {_shown(program.name)}"
    if program.protocol is ProgramProtocol.DYNAMO:
        what += ", which speaks Dynamo's protocol and never registers here"
    else:
        what += ", which never registers"
    if program.engine is None:
        return f"{what}: use an engine that kvrouter has a worker for (kvrouter worker --help)"
    server = "it" if program.protocol is ProgramProtocol.HTTP else f"{ENGINE_LABELS[program.engine]}'s server"
    args = f"[worker, {program.engine}, --url, URL]"
    return f"{what}: run {server} as a sidecar, main without an image: args {args}"


def _of_frontend(program: Program, at: Path) -> Iterator[Problem]:
    if program.protocol in (ProgramProtocol.DYNAMO, ProgramProtocol.HTTP):
        found = _shown(program.name)
        yield Problem(
            at, f"runs {found}, which finds none of kvrouter's workers: leave out image, command and args"
        )
    elif program.protocol is ProgramProtocol.KVROUTER and program.name == "worker":
        yield Problem(at, "runs kvrouter worker in a frontend: args begin with frontend")


NAME_CHARS_SHOWN = 32


def _shown(name: str) -> str:
    """Return the end of a program's or image's name, short enough for the warnings of an API server."""
    name = name.rpartition("/")[2]
    return name if len(name) <= NAME_CHARS_SHOWN else f"{name[:NAME_CHARS_SHOWN]}…"
