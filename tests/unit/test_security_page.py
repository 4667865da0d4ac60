"""The page on security names every limit, with the value that it has in code."""

import ast
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import kvrouter
from kvrouter.config.planes import KUBERNETES_LEASE_S, LEASE_S
from kvrouter.config.setting_spec import SettingSpec
from kvrouter.config.tree import SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
LIMIT = re.compile(r"_(max|min|limit|timeout|within|stall|water|overflow)(_|$)|_wait_s$")
NO_LIMIT = {"router_min_initial_workers", "circuit_open_max_s"}
"""Settings whose names look like it."""

UNSET = {
    "--connections-max": "16,384, fewer where `ulimit -n` is lower",
    "--body-max-bytes": "what the longest context here can need, at most 64 MiB",
    "--body-max-token-ids": "the longest context",
    "--token-max-chars": "context length × the longest token",
    "--ttft-timeout-s": "none",
    "--lease-s": f"{LEASE_S:g} s, {KUBERNETES_LEASE_S:g} s on Kubernetes",
}
"""What the page says of settings that are unset by default."""


class Row(NamedTuple):
    """A line of one of the page's tables of limits."""

    what: str
    default: str
    flags: tuple[str, ...]
    when_full: str


def rows() -> list[Row]:
    found = []
    for line in PAGE[PAGE.index("## Limits of the frontend") :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "what" or cells[0].startswith("---"):
            continue
        *first, last = cells
        settings = first[2] if len(first) > 2 and not first[2].startswith("follows") else ""
        found.append(Row(first[0], first[1], tuple(re.findall(r"`(--[\w-]+)`", settings)), last))
    return found


ROWS = rows()
BY_FLAG: dict[str, SettingSpec] = {spec.flag: spec for spec in SETTINGS if spec.flag is not None}


def text_of(spec: SettingSpec) -> str:
    """The default as the page writes it."""
    default = spec.default
    if default is None:
        return UNSET[str(spec.flag)]
    assert isinstance(default, int | float)
    if spec.unit == "seconds":
        return f"{default:g} s"
    if spec.unit in ("bytes", "bytes per second"):
        power, name = (20, "MiB") if default >= 1 << 20 else (10, "KiB")
        return f"{int(default) >> power} {name}{'/s' if spec.unit != 'bytes' else ''}"
    return f"{default:,}"


def says(words: str, text: str) -> bool:
    """Whether ``text`` stands in ``words``, and not as a part of another number."""
    return re.search(rf"(?<![\d,.]){re.escape(text)}(?![\d]|[,.]\d| ?[KMG]iB|/s)", words) is not None


def limits() -> list[str]:
    specs = [spec for spec in SETTINGS if LIMIT.search(spec.name) and spec.name not in NO_LIMIT]
    return sorted(str(spec.flag or spec.variable) for spec in specs)


@pytest.mark.parametrize("setting", limits())
def test_every_limit_with_a_setting_is_on_the_page(setting: str) -> None:
    assert setting in {flag for row in ROWS for flag in row.flags}


@pytest.mark.parametrize("row", [row for row in ROWS if row.flags], ids=lambda row: row.what)
def test_the_defaults_on_the_page_are_those_in_code(row: Row) -> None:
    """In the order of the settings, where there is one word for each."""
    texts = [text_of(BY_FLAG[flag]) for flag in row.flags]
    parts = re.split(r", |; ", row.default)
    if len(parts) == len(texts) > 1:
        for text, part in zip(texts, parts, strict=True):
            assert says(part, text)
    else:
        for text in texts:
            assert says(row.default, text) or says(row.when_full, text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_every_limit_says_what_it_is_and_what_happens_when_it_is_full(row: Row) -> None:
    assert all((row.what, row.default, row.when_full))


SOURCE = Path(kvrouter.__file__).parent
LIMIT_CONSTANT = re.compile(r"_?([A-Z0-9]+_)*(MAX|LIMIT)(_[A-Z0-9]+)*")

NO_LIMITS = {
    "kinds of numbers, formats and names of other systems": """
        wiring.worker_transports.PORT_MAX config.variables._PORT_MAX mock.remote.PORT_MAX
        mock.remote.HOST_CHARS_MAX engines.vllm.introspect.FIGURE_MAX fleet.columns.INTEGER_MAX
        frontend.openai.parse._NUMBER_DIGITS_MAX operator.plan.serving.PORT_DIGITS_MAX
        operator.plan.budgets.COUNT_DIGITS_MAX transports.events.port.BLOCKS_MAX
        transports.events.wire.EVENT_ID_MAX engines.openai.pages.COUNT_MAX
        engines.vllm.events.LOOKAHEAD_TOKENS_MAX
        transports.events.wire.COUNT_MAX transports.requests.tcp.plane._ID_LIMIT
        placement.placer.ROOM_LIMIT sim.roofline.BLOCKS_MAX placement.interference.RATIO_MAX
        operator.api.names.DOMAIN_CHARS_MAX operator.api.names.LABEL_PREFIX_CHARS_MAX
        operator.api.names.LABEL_KEY_CHARS_MAX operator.api.names.OBJECT_CHARS_MAX
        operator.api.names.SERVICE_CHARS_MAX operator.api.names.LABEL_VALUE_CHARS_MAX
        operator.api.names.LEVEL_CHARS_MAX operator.api.names.VARIABLE_CHARS_MAX
        operator.api.names.PODS_MAX operator.api.names.QUANTITY_CHARS_MAX
        operator.labels.copies.POD_NAME_STEM_CHARS_MAX operator.labels.copies.POD_NAME_CHARS_MAX
        operator.api.status.BANDWIDTH_MAX operator.plan.manifest.NAME_CHARS_MAX
        operator.reconcile.bindings.OWNER_CHARS_MAX
        kube.objects.NAME_CHARS_MAX kube.objects.MESSAGE_CHARS_MAX
        operator.status.finding.NOTE_CHARS_MAX transports.discovery.kubernetes.objects.FLEET_CHARS_MAX
        worker.topology_env.DOMAIN_CHARS_MAX worker.topology_env.VALUE_CHARS_MAX
        worker.topology._BYTES_MAX
    """,
    "pauses, ticks and retries": """
        processes.supervisor.RESTART_MAX_S wiring.nats.CONNECT_LIMIT_S wiring.nats.PINGS_UNANSWERED_MAX
        core.backoff.DOUBLED_MAX operator.reconcile.workqueue.RETRY_MAX_S
        kube.informer.RETRY_MAX_S transports.discovery.kubernetes.api.RETRY_MAX_S
        transports.discovery.kubernetes.records.TICK_MAX_S transports.discovery.nats.bucket.TICK_MAX_S
        transports.events.jetstream.stream_subscriber.STORED_ANSWER_MAX_S
        transports.events.jetstream.stream_subscriber.READS_MAX
        transports.events.zmq.sockets.RECONNECT_MAX_MS worker.topology._READS_MAX
        recording.recorder.CLOSE_LIMIT_S
        wiring.tracing.FLUSH_LIMIT_S
    """,
    "how much of a known size is done or remembered at a time": """
        placement.speeds.SLOWNESS_MAX placement.link_speeds.SLOWNESS_MAX placement.link_speeds.EXTRA_MAX_S
        placement.link_speeds.KIND_TRANSFERS_MAX placement.link_speeds.LINK_TRANSFERS_MAX
        placement.link_speeds.LINKS_MAX placement.link_speeds.KINDS_MAX core.sync.AMOUNT_MAX
        frontend.fleet_state.LINK_SERIES_MAX
        placement.transfers.LOOKED_AT_MAX routing.links.NAMES_MAX
        transports.discovery.memory.REPLACED_MAX transports.events.jetstream.publisher.MERGED_EVENTS_MAX
        routing.pick.UNSEEN_MAX telemetry.logs.LINES_MAX text.model.HELD_TOKENS_MAX
        frontend.openai.passthrough._HARMLESS_BYTES_MAX frontend.openai.body._NAME_BYTES_MAX
        kube.kubeconfig.CONNECTIONS_MAX library.inputs.MAX_TOKENS_DEFAULT
        operator.admission.certificates.AUTHORITIES_MAX recording.recorder.BATCH_BYTES_MAX
    """,
    "`kvrouter replay`, which reads its own user's files and serves nobody": """
        sim.rules.affinity.SESSIONS_MAX sim.rules.registry.GRID_MAX sim.simulation.CEILING_BLOCKS_MAX
        sim.measured_run.RUN_FILE_BYTES_MAX recording.records.WORKERS_MAX recording.records.RANKS_MAX
        sim.traces.lines.LINE_BYTES_MAX sim.traces.mooncake_delta.PIECES_MAX
        sim.traces.mooncake_row.TOKENS_MAX sim.traces.read.GENERATOR_BYTES_MAX
        sim.variant.VARIANTS_MAX
    """,
    "what messages of our own quote": """
        config.problems._SHOWN_MAX_CHARS frontend.openai.body.SHOWN_BYTES_MAX text.chat.ERROR_CHARS_MAX
        operator.reconcile.recorder.WARNINGS_REPORTED_MAX frontend.openai.body.SHOWN_CHARS_MAX
    """,
    "processes of `kvrouter up` and mock engines, which serve nobody else": """
        commands.multi_process.STOP_LIMIT_S commands.multi_process.NATS_LOG_MAX_BYTES
        mock.remote.REASON_CHARS_MAX engines.mock.cluster.TURN_MAX_S engines.mock.transfer.UNSENT_BYTES_MAX
        engines.mock.transfer.TOKEN_BYTES_MAX engines.mock.transfer.HELLO_BYTES_MAX
        engines.mock.transfer.FRAME_BYTES_MAX
    """,
    "parts of the bounds of one template, whose sums are on the page": """
        text.chat.TIME_PATTERN_CHARS_MAX text.template_budget.DEPTH_MAX text.template_budget.NUMBER_BITS_MAX
        text.template_filters.NUMBER_ARGUMENT_MAX text.template_filters.ROUND_DIGITS_MAX
        text.template_filters.SEPARATOR_CHARS_MAX text.template_filters.JSON_INDENT_MAX
    """,
}
"""Constants that are named as limits are and are not on the page, by the reason."""

WHERE = {
    "connections": "processes.lifetime.CONNECTIONS",
    "body of a request": "frontend.prepare.BODY",
    "body of an operators' route": "frontend.prepare.PAGE",
    "a form with a file": "frontend.openai.form",
    "what compressed bodies become": "frontend.compressed.EXTRA",
    "a field of a call to engines": "frontend.openai.passthrough",
    "shapes of calls": "service.prompt_shapes",
    "prompts that engines tokenize": "service.engine_tokenizer",
    "a `cache_salt`": "frontend.openai api.cordons",
    "what a body may become": "frontend.openai.body",
    "blanks outside": "core.json_bounds",
    "JSON of an engine": "core.json.",
    "a frame of msgpack": "core.json.FRAME_",
    "an engine's answer to a small": "engines.openai.server engines.openai.metrics",
    "requests that wait for a decode": "placement.waiting_line",
    "a field's name": "frontend.openai.body",
    "messages of a chat": "text.prompts.fields text.model frontend.openai.parse frontend.openai.parse",
    "rendering a chat template": "text.chat text.template_budget",
    "descriptors that the process": "processes.lifetime.FILES",
    "refused connections": "processes.lifetime.REFUSED",
    "tokenizer and template": "text.source",
    "models whose tokenizers": "wiring.text_models",
    "text that a chat template renders": "text.chat.RENDERED",
    "token ids of a body": "frontend.prepare.NUMBERS",
    "token ids of `stop`": "frontend.openai.parse frontend.openai.body",
    "requests that are booked": "service.bookings service.prefill_dispatch",
    "pairs of workers": "placement.circuits",
    "decisions in one answer": "frontend.admin.DECISIONS service.model_router.TABLES service.kv_flows.PAIRS",
    "decisions kept of one": "service.model_router frontend.instrumentation frontend.chat_render telemetry",
    "records of traffic": "recording",
    "values of taints": "fleet.columns frontend.response_writer",
    "a key, token": "core.secret",
    "connections to a worker": "transports.listener",
    "routers at one listener": "transports.listener.ROUTERS transports.requests.session.STREAMS",
    "blocks of a rank": "service.event_ingest.RANK",
    "bytes of a rank's snapshot": "transports.events.wire.SNAPSHOT",
    "bytes of missed events": "transports.events.wire.RANGE",
    "events of a rank that wait": "service.rank_ingest",
    "slots of a ledger": "index fleet.fleet",
    "http connections": "transports.requests.http.connections",
    "connections of engines": "worker.engine_door",
    "running requests at the end": "config.worker_options",
    "workers of a fleet": "service.router transports.discovery",
    "dispatches of one": "journey",
    "legs that a worker remembers": "transports.requests.legs.ENDED",
    "requests that arrived in part": "transports.requests.session.READING",
    "what a tcp peer": "transports.requests.session.UNREAD",
    "a request, as a worker": "transports.requests.stream transports.requests.messages.CHUNK",
    "legs that one worker runs": "transports.requests.legs",
    "over http": "transports.requests.http",
    "over NATS": "transports.requests.nats",
    "an error's reason": "transports.requests.messages",
    "senders whose": "transports.message_auth",
    "a record of discovery": "transports.discovery.wire transports.discovery.card_tracker",
    "cordons of": "core.cordons transports.discovery.wire",
    "files of a discovery": "transports.discovery",
    "an answer of the API server": "kube.client",
    "messages of NATS": "transports.events.nats.UNREAD transports.discovery.nats.bucket",
    "events that wait to be sent over NATS": "transports.events.nats.QUEUE",
    "a batch of events": "transports.events.wire",
    "sockets of one": "transports.events.zmq.subscriber.SOCKETS",
    "messages that wait for one ZeroMQ": "transports.events.zmq",
    "a question of recovery": "transports.events service.event_ingest.SNAPSHOTS",
    "events that a worker keeps": "worker.publisher",
    "over JetStream": "transports.events.jetstream",
    "replica sync: other": "ledger",
    "links that routers learn": "core.sync placement.transfers commands.learned_file ledger.link_exchange",
    "replica sync: deltas": "ledger core.sync transports.sync",
    "answers of an engine": "engines.openai",
    "an error answer of an engine": "core.engine_answer",
    "headers of a good answer": "core.engine_answer http_client",
    "how long an engine": "engines",
    "KV events of an engine": "engines.kv_events engines.trtllm",
    "an answer that `kvrouter`": "cli api.client",
    "a request that `kvrouter calibrate": "cli.calibrate sim.engine_load",
    "a fleet file": "config",
    "a file for `kvrouter operator convert`": "commands.operator_convert",
    "a leg in a worker": "worker.worker",
    "words of the API server": "operator.reconcile.dry_run operator.status",
    "bodies at admission": "operator.admission.server",
    "a line of a warning at admission": "operator.admission operator.api.deployment operator.plan.programs",
    "components of a deployment": "operator.api",
    "`tracestate` or `baggage`": "frontend.generate.TRACE",
    "links in a status": "operator.reconcile.link_reader operator.api.status.LINKS",
    "nodes whose labels": "operator.labels operator.reconcile.workqueue operator.run",
}
"""In which row the limits of a module are, by the row's first words."""


def constants() -> list[str]:
    """Return all constants of the package's modules that are named as limits are."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for statement in ast.parse(path.read_text("utf-8")).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found += [f"{module}.{name}" for name in names if LIMIT_CONSTANT.fullmatch(name)]
    return found


def forms(name: str, value: float) -> list[str]:
    """How the page may write a constant's value."""
    if "CPU_S_" in name and value < 1:
        return [f"{value * 1000:g} ms"]
    if re.search(r"_S(_|$)", name):
        return [f"{value:g} s", f"{value:,.0f} s"]
    if name.endswith("_MS"):
        return [f"{value / 1000:g} s"]
    powers = {"GiB": 30, "MiB": 20, "KiB": 10, "Ki": 10}
    units = [f"{int(value) >> power} {unit}" for unit, power in powers.items() if not value % (1 << power)]
    return [f"{value:,}", *units]


def stands(words: str, text: str) -> bool:
    return re.search(rf"(?<![\d,.]){re.escape(text)}(?!\d|[,.]\d| ?[KMG]iB)", words) is not None


NOT_LIMITS = {name for names in NO_LIMITS.values() for name in names.split()}
CONSTANTS = constants()


@pytest.mark.parametrize("name", [name for name in CONSTANTS if name not in NOT_LIMITS])
def test_every_constant_that_is_a_limit_is_on_the_page(name: str) -> None:
    module, _, constant = name.rpartition(".")
    value = getattr(importlib.import_module(f"kvrouter.{module}"), constant)
    texts = [
        f"{row.what} | {row.default} | {row.when_full}"
        for first, names in WHERE.items()
        for row in ROWS
        if row.what.startswith(first) and any(name.startswith(each) for each in names.split())
    ]
    assert any(stands(words, text) for words in texts for text in forms(constant, value))


def test_the_constants_that_are_no_limits_exist() -> None:
    assert set(CONSTANTS) >= NOT_LIMITS
