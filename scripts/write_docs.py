"""Write the pages made from the code: settings, fleet file, metrics, log events, differences, modules.

``python -m scripts.write_docs`` writes them; with ``--check`` it writes nothing, names each page that is
not what the code says, each that the index of pages does not have once, and each relative link of any page to
a file that is not there, and exits 1 when there is one.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from logging import getLevelName
from pathlib import Path
from textwrap import fill
from urllib.parse import unquote

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.dynamo_settings import (
    FOREIGN,
    FOREIGN_DISCOVERY,
    FOREIGN_MODES,
    FOREIGN_QUEUE_POLICIES,
    Foreign,
)
from kvrouter.settings.setting import choices_of, limits_of, model_in, models_in
from kvrouter.settings.setting_spec import SettingGroup, SettingKind, SettingSpec
from kvrouter.settings.tree import SETTINGS, Settings
from kvrouter.telemetry import Event, GenAiMetrics, OperatorTelemetry, Telemetry
from kvrouter.telemetry.gen_ai import GEN_AI_OPT_IN, GEN_AI_SWITCH
from kvrouter.telemetry.log_events import FIELD_NAMES
from scripts.module_map import module_map
from tests.system.differential.differences import DIFFERENCES

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- Made by `make docs` from the code: change the code, not this page. -->\n"

SETTINGS_HEAD = f"""# Settings

{MADE}
Every setting of `kvrouter up` can be given as a flag, as an environment variable, or in the fleet file
([its page](fleet-file.md)). A flag wins over a variable, a variable over the file, the file over the default.
`kvrouter up --help` shows the ten that matter first, `--help-all` every one.

- A blank variable counts as unset.
- The variables that kubelets set for Services are no settings, even if a Service is called `kvrouter…` or
  `dyn…` (`KVROUTER_PORT=tcp://10.0.0.7:8000`, and seven more): kvrouter recognizes them by their names
  and values.
- An unknown key of the file, an unknown `KVROUTER_*` variable and a value out of range end the start with
  exit code 2 and one line for each mistake: the field, where the value came from, and what it must be.
- `DYN_*` variables that are not on this page belong to other programs and are left alone; one that is
  almost a name in these tables is warned about. Every `DYN_X` that is read may be written `KVROUTER_X`.
- *Other names* are those under which users of Dynamo know a setting, of its earlier and its later releases:
  a flag, a variable, or a key (which is also a field of `KvRouterConfig` in a program). They set the same.
  A setting that is given under two names which differ, in one command line, one environment or one file, is
  a mistake that names both.
- A switch is on for `true`, `1`, `yes`, `on` and off for `false`, `0`, `no`, `off`; as a flag,
  `--kv-events` turns it on and `--no-kv-events` off.
"""

FLEET_HEAD = f"""# The fleet file

{MADE}
`kvrouter up --fleet fleet.yaml` (or `KVROUTER_FLEET=fleet.yaml`) runs the fleet that the file describes.
Without a file, the fleet of
[`examples/fleet.yaml`](../examples/fleet.yaml) runs: two zones, one prefill and two decode workers in each,
KV that never leaves its zone, and a context length of 32,768 tokens.

## Write, show and check one

```text
kvrouter fleet init                       # writes fleet.yaml, with comments: four mock workers
kvrouter fleet init --zone a --zone b     # prefill and decode workers in two zones, which KV does not leave
kvrouter fleet init --engine vllm --url prefill@a=http://10.0.1.1:8000 \\
  --url decode@a=http://10.0.1.2:8000     # engines that run already, which are asked for their model
kvrouter fleet show                       # what fleet.yaml means after defaults, as tables; or name a file
kvrouter fleet show --url http://127.0.0.1:8000   # the workers that a running router has
kvrouter fleet check --strict --connect   # fleet.yaml too, or the file that is named
```

`init` replaces a file only with `--force`. Without `--model` it asks the engines at `--url` for the name of
their model, and prints what each answers; of one that does not answer the name is left out of the file, and
asked when the fleet is run. `kvrouter up` with the same [`--engine` and `--url`](engines.md#engines-at-urls)
serves that fleet without a file. `check` validates the file, its settings and the topology
contracts of its groups, reads the tokenizers that it names, and starts nothing. A tokenizer that cannot be
read is a mistake for mock engines; before engines that run already it is a warning, because their calls are
served and [routed by load](http-api.md#a-model-whose-prompts-cannot-be-read). `show` and `check` take
`--output json`, as every command does that prints a result; `--output json=FILE` prints the table and writes
the JSON to the file.

A mistake is named with its line, all mistakes at once:

```text
fleet.yaml:12: workers[0].replicas: must be ≥ 1, not 0
fleet.yaml:13: workers[0].domains.zne: must be one of topology.levels (zone), not 'zne' (did you mean zone?)
```

Unknown keys and keys given twice are mistakes. What can be run but was hardly meant, such as a zone with
prefill workers and no decode worker, is a warning.

- **`--strict`** takes warnings for mistakes, and finds more: a level that is in no worker, a group without a
  level that others have, measured links of places where no worker is, addresses that are one although
  they are spelled differently, and engines at hosts that are named as in examples (`HOST`, `TODO`,
  `your-…`, `example.com`). A placeholder that can never be an address, such as `${{HOST}}` or `<your-host>`,
  is a mistake without it too.
- **`--no-kv-events`** checks the file for `kvrouter up --no-kv-events`: groups with `kv_events: false` are
  then as they should be. Settings in variables count as they do for `kvrouter up`.
- **`--connect`** asks every engine that runs already what it is, once, and compares: model, block size,
  context length, ranks, and block sizes that differ within one model. A warning that its worker would log is
  one here.

| exit code of `check` | |
| --- | --- |
| 0 | The file is good; without `--strict` there may be warnings. |
| 1 | The file is good, but an engine does not answer (`--connect`). |
| 2 | The file has mistakes, or with `--strict` warnings, or cannot be read. |

## Engines that run already

A group's `engine` is a mock engine, or a server that runs already, for which this is a whole file:

```yaml
version: 1
models: [{{name: my-model, tokenizer: /models/my-model}}]
workers: [{{name: a, engine: {{kind: vllm, url: "http://10.0.0.7:8000"}}}}]
```

`kvrouter up` serves HTTP and runs a worker for each engine, all in one process.
`examples/fleet-engines.yaml` has two zones of prefill and decode engines. Roles, domains, taints and the
transfer policy mean what they mean for every worker.

- **What an engine can be asked is asked**: the model's name where the file has none, block size, context
  length, ranks, capacity, event sources. What the file says of these is checked.
- **An engine that contradicts the file** ends the start with exit code 2 and a line that names the engine,
  the field and the fix: `workers[0].engine.url: http://10.0.0.7:8000: models[0].block_size: the engine's
  blocks have 16 tokens, not 32: …`. One that answers only later is left out, reported in the log
  (`worker_refused`) and on [`/ready`](http-api.md#expected-engines), and asked again every ten seconds: it
  may be restarted as it should be.
- **An engine that is not up yet** holds nobody up: HTTP is served, `/ready` names the engines that are
  awaited, with their URLs and why, and each joins once it answers. The first line on standard output has
  that too (`1 of 2 engines, waiting for http://10.0.0.8:8000 (connection refused)`), and another one follows
  as engines join or leave, also with `--replicas` and `--nats`. One that comes back as another one, with
  other ranks or a longer context, gets another worker; one that then contradicts the file has none, and is
  logged as such.
- **A key** that engines ask for is read from `KVROUTER_ENGINE_API_KEY`, and from nowhere else.
- Groups of several kinds may share a file, and a model too where all its engines have blocks of one size. A
  model's prefill and decode engines must be of one kind: KV goes between engines that understand each other.
- With `--replicas` or `--nats` each engine's worker is a process of its own. So it is wherever you run
  `kvrouter worker vllm --fleet fleet.yaml --group a --index 0`, on the engine's host or elsewhere.
"""

METRICS_HEAD = f"""# Metrics and log events

{MADE}
`GET /metrics` answers in Prometheus' text format, or in OpenMetrics where that is accepted: then buckets
of times name a trace ([exemplars](monitoring.md#from-a-number-to-its-trace)). A family holds at most 16,384
label sets; what comes later is counted under `_full`, and nothing is lost. What is counted of one rank's
engine (`kvrouter_index_predictions_total`, `kvrouter_kv_transfer…`, `kvrouter_kv_events_skipped_total`) goes
with the rank. `model` is a model that is served or `unknown`, never a name that a client made up.
`kvrouter_operator_…` are those of `kvrouter operator run`; `gen_ai_…` are there only with
`{GEN_AI_SWITCH}={GEN_AI_OPT_IN}`.
"""

EVENTS_HEAD = """
## Log events

Lines go to standard error, as text or as JSON (`--log-format`). Prompts and answers are never logged: a
line can only have the fields below, and none of them holds either. Tracebacks name places, and quote only
our own errors and the system's. What other libraries log by Python's `logging`, from warnings up, has the
same form.

A thread writes the lines, so that no request waits for whoever reads them: warnings and the first line after
a pause at once, others together every 0.2 s. Processes may share a pipe: a line of up to 4 KiB stays whole.
Up to 1 MiB of lines waits for a slow reader, and up to 2 MiB with warnings; further lines are lost, said by
`log_lines_lost` once it reads again, and at frontends and standalone routers counted in
`kvrouter_log_lines_lost_total`. Where `kvrouter up` starts processes, it then reads no more of their lines,
and each of them keeps its warnings. A process that exits, also on SIGTERM or by an error, writes all lines
first: for at most 10 s, and for 1 s where nobody reads them. Killed (`kill -9`, or by a second SIGTERM) or
crashed, it loses the lines of its last 0.2 s, and those that waited for their reader.

At `info` a request is one line, `request_ended`. It has the fields of the request's last `decision`, the line
that `debug` adds for each: in the place of its `attempt` the number of `attempts`, and `isl_tokens` of the
prompt alone, where that of an answer that was resumed counts the tokens so far. At a frontend `isl_tokens` is
the engine's count where it states one.
"""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def settings_page() -> str:
    """Return the page of all settings, by group."""
    parts = [SETTINGS_HEAD]
    for group in SettingGroup:
        rows = [_setting_row(spec) for spec in SETTINGS if spec.group is group]
        head = ("flag", "variable", "key in YAML", "default", "unit", "limits", "meaning")
        parts.append(f"\n## {group.value}\n\n{table(head, rows)}")
        others = [_other_names_row(spec) for spec in SETTINGS if spec.group is group and _other_names(spec)]
        if others:
            parts.append(f"\n{table(('key in YAML', 'other names'), others)}")
    parts.append(f"\n{FOREIGN_HEAD}\n{table(FOREIGN_COLUMNS, map(_foreign_row, FOREIGN))}")
    values = [
        (f"`{flag} {value}`", why)
        for flag, foreign in (
            ("--router-mode", FOREIGN_MODES),
            ("--router-queue-policy", FOREIGN_QUEUE_POLICIES),
            ("--discovery", FOREIGN_DISCOVERY),
        )
        for value, why in foreign.items()
    ]
    parts.append(f"\nThese values of Dynamo's are refused:\n\n{table(('value', 'instead'), values)}")
    return "".join(parts)


def _other_names(spec: SettingSpec) -> tuple[str, ...]:
    flags = [_flag_text(spec, flag) for flag in spec.flags[1:]]
    names = (*spec.aliases.variables, *(f"{spec.section}.{name}" for name in spec.aliases.names))
    return (*flags, *(f"`{name}`" for name in names))


def _other_names_row(spec: SettingSpec) -> tuple[str, ...]:
    return f"`{spec.yaml_key}`", ", ".join(_other_names(spec))


def _flag_text(spec: SettingSpec, flag: str) -> str:
    if spec.kind is SettingKind.SWITCH:
        return f"`{flag}`, `--no-{flag.removeprefix('--')}`"
    return f"`{flag}`"


FOREIGN_COLUMNS = ("flag", "variable", "field of `KvRouterConfig`, key in YAML", "taken as", "instead")
FOREIGN_HEAD = """## Names of Dynamo's that set nothing here

A flag, a key or a field of these ends the start, and says what is in the last column; a variable is warned
about. A value that asks for what kvrouter does anyway is accepted without a message: null always, and the
values in the column *taken as*.
"""


def _foreign_row(foreign: Foreign) -> tuple[str, ...]:
    met = (str(value).lower() if isinstance(value, bool) else str(value) for value in foreign.met)
    return (
        ", ".join(f"`{flag}`" for flag in foreign.flags),
        ", ".join(f"`{variable}`" for variable in foreign.variables),
        f"`{foreign.name}`" if foreign.section == "router" else "",
        ", ".join(met),
        foreign.why,
    )


def _setting_row(spec: SettingSpec) -> tuple[str, ...]:
    flag = "none" if spec.flag is None else _flag_text(spec, spec.flag)
    limits = "true | false" if spec.kind is SettingKind.SWITCH else spec.limits
    return (
        flag,
        f"`{spec.variable}`",
        f"`{spec.yaml_key}`",
        spec.default_text,
        spec.unit or "",
        limits,
        spec.meaning.replace("``", "`"),
    )


def fleet_page() -> str:
    """Return the page of the fleet file: one table for each kind of part."""
    parts = [FLEET_HEAD]
    for path, model in _parts_of(FleetFile, ""):
        title = f"`{path}`{_kinds(model)}" if path else "The file"
        rows = [_fleet_row(name, field) for name, field in model.model_fields.items()]
        about = " ".join((model.__doc__ or "").split()).replace("``", "`")
        head = ("key", "default", "limits", "meaning")
        parts.append(f"\n## {title}\n\n{about}\n\n{table(head, rows)}")
    return "".join(parts)


def _kinds(model: type[BaseModel]) -> str:
    """Which of several parts in one place it is: those of these kinds."""
    kind = model.model_fields.get("kind")
    return "" if kind is None else f", `kind`: {' or '.join(choices_of(kind.annotation))}"


def _parts_of(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every part of the file with its path; the settings have a page of their own."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = models_in(field.annotation)
        if name in Settings.model_fields:
            continue
        listed = "[]" if "tuple" in str(field.annotation) else ""
        named = ".<level>" if "Mapping" in str(field.annotation) else ""
        below = f"{path}.{name}{listed}{named}".lstrip(".")
        for part in inner:
            yield from _parts_of(part, below)


def _fleet_row(name: str, field: FieldInfo) -> tuple[str, ...]:
    meaning = " ".join((field.description or "").split()).replace("``", "`")
    if name in Settings.model_fields and model_in(field.annotation) is not None:
        return (f"`{name}`", "", "", f"{meaning} See [settings](settings.md).")
    return (f"`{name}`", _default(field), limits_of(field), meaning)


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "**required**"
    if isinstance(value, StrEnum):
        return value.value
    if value is None or value in ((), {}) or isinstance(value, BaseModel):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def metrics_page() -> str:
    """Return the page of metrics and log events."""
    metrics = [
        (f"`{spec.name}`", spec.kind, ", ".join(f"`{label}`" for label in spec.labels), spec.meaning)
        for spec in (*Telemetry.SPECS, *OperatorTelemetry.SPECS, *GenAiMetrics.SPECS)
    ]
    events = [(f"`{event.value}`", getLevelName(event.level).lower(), event.meaning) for event in Event]
    fields = fill(f"Fields: {', '.join(f'`{name}`' for name in sorted(FIELD_NAMES))}.", 110)
    return (
        f"{METRICS_HEAD}\n{table(('metric', 'kind', 'labels', 'meaning'), metrics)}"
        f"{EVENTS_HEAD}\n{table(('event', 'level', 'meaning'), events)}\n{fields}\n"
    )


DIFFERENCES_HEAD = f"""# Differences

{MADE}
Before a model whose engines take calls as clients write them (vLLM, SGLang, TensorRT-LLM), a call gets
through kvrouter what the engine alone would answer: the same status, the same bytes, the same events in the
same order, and the same headers. This page names every difference, and why it is there.

`make test-differential` makes every call twice, directly and through kvrouter, before a scripted engine that
answers as vLLM 0.32 does. It compares the status, the body, each header, and what the engine was asked. What
no row of this table names fails the test; so does a row that no call shows, and a changed byte of an answer
that goes unnoticed. `make test-engines` compares the same before a real vLLM, also as the packages `openai`
and `anthropic` are answered. Not compared are headers of one connection or one moment (`connection`, `date`,
`keep-alive`, `server`, `transfer-encoding`), and the chunks that an answer comes in.

Two differences have no row, because the scripted engine does not make them. vLLM makes the `id` of an answer
of the call's `X-Request-Id`; through kvrouter that is the client's, with what tells attempts apart behind it.
An answer that an engine compresses though nobody asked for that passes as it is, without `content-encoding`.

What becomes of a call whose engine is lost is on the page [When things die](when-things-die.md): kvrouter
answers it, and the engine alone does not.
"""


def differences_page() -> str:
    """Return the page of what differs between an engine alone and the same through kvrouter."""
    rows = [(row.calls, row.shown or _field_text(row.field), row.through, row.reason) for row in DIFFERENCES]
    return f"{DIFFERENCES_HEAD}\n{table(('calls', 'field', 'through kvrouter', 'why'), rows)}"


def _field_text(field: str) -> str:
    kind, _, name = field.partition(" ")
    return f"`{name}`" if kind == "header" else field


FENCE = re.compile(r"^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(?<!\\)\]\(\s*<?(?P<target>[^)\s>]+)")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def dead_links(docs: Path) -> list[str]:
    """Return a line for each relative link of the README and of the pages that leads nowhere."""
    root = docs.parent
    readme = root / "README.md"
    dead: list[str] = []
    for page in [*([readme] if readme.is_file() else []), *sorted(docs.rglob("*.md"))]:
        text = FENCE.sub(_blank, page.read_text("utf-8"))
        text = CODE.sub(_blank, text)
        for link in LINK.finditer(text):
            target = link["target"]
            path = unquote(target.partition("#")[0])
            if path and not SCHEME.match(target) and not (page.parent / path).exists():
                line = text.count("\n", 0, link.start()) + 1
                dead.append(f"{page.relative_to(root).as_posix()}:{line}: dead link: {target}")
    return dead


def not_listed_once(docs: Path) -> list[str]:
    """Return a line for each page that the index of pages, ``docs/README.md``, does not have exactly once."""
    index = docs / "README.md"
    listed = [unquote(link["target"]) for link in LINK.finditer(index.read_text("utf-8"))]
    counts = {page.name: listed.count(page.name) for page in sorted(docs.glob("*.md")) if page != index}
    return [f"docs/README.md: has {name} {count} times" for name, count in counts.items() if count != 1]


def _blank(code: re.Match[str]) -> str:
    """Nothing of code is a link; its lines still count. A link's own text may be code."""
    return "\n" * code[0].count("\n")


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "fleet-file.md": fleet_page,
    "metrics.md": metrics_page,
    "differences.md": differences_page,
    "module-map.md": partial(module_map, MADE),
}


def main(arguments: list[str], docs: Path = DOCS) -> int:
    """Write the pages, or check them; return the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m scripts.write_docs [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, page in PAGES.items():
        path, text = docs / name, page()
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(name)
        if not arguments:
            path.write_text(text, "utf-8")
            print(f"docs/{name}: written")
    if not arguments:
        return 0
    wrong = [f"docs/{name}: stale, run make docs" for name in stale]
    wrong += [*not_listed_once(docs), *dead_links(docs)]
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
