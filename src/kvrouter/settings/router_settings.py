"""The router's settings: cost, thresholds, timeouts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval, MaxLen, MinLen
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from kvrouter.core.constraints import NearEnforcement, PdSelection, QueuePolicy, RouterMode
from kvrouter.core.cost_rules import BLOCKS, COST_RULES, TIME
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.settings.dynamo_settings import FOREIGN_FIELDS, FOREIGN_MODES, FOREIGN_QUEUE_POLICIES
from kvrouter.settings.planes import PlainName
from kvrouter.settings.setting import (
    Count,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    PositiveCount,
    Section,
    Setting,
    Switch,
    Whole,
    refusing,
)
from kvrouter.settings.setting_spec import Aliases, SettingGroup

if TYPE_CHECKING:
    CostName = str
else:
    CostName = Literal[tuple(COST_RULES)]


class KvRouterConfig(Section):
    """How one router decides. Also for those who embed it: ``KvRouterConfig(router_temperature=0.5)``.

    A field is also taken under the names that Dynamo's has, such as ``use_kv_events``. Raises
    ``pydantic.ValidationError``, a ValueError, that names the field when a value is out of range, when two
    names of one field differ, and for a field of Dynamo's that would have no effect here.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_foreign(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        for name in FOREIGN_FIELDS.keys() & values.keys():
            foreign = FOREIGN_FIELDS[name]
            if not foreign.is_met_by(values[name]):
                raise PydanticCustomError("no_effect", "{key} {why}", {"key": name, "why": foreign.message})
        return {name: value for name, value in values.items() if name not in FOREIGN_FIELDS}

    router_mode: Annotated[
        RouterMode, refusing(FOREIGN_MODES), Setting(SettingGroup.ROUTING, variable="DYN_ROUTER_MODE")
    ] = RouterMode.KV
    """How a worker is picked among those that are eligible: by cost, in turn, or by chance. Eligibility
    (roles, taints, topology, busy workers) is the same in every mode."""

    router_cost: Annotated[CostName | None, Setting(SettingGroup.ROUTING)] = None
    """What a worker costs where the cheapest is picked: blocks to prefill and to decode, the predicted time
    to the first token, or LMetric's product of prompt tokens and requests. Time learns how fast each worker
    is; neither it nor LMetric has to be tuned. Unset: time, and blocks where a weight of the blocks is
    stated: `--kv-overlap-score-weight`, whatever its value, or `--kv-transfer-weight` above 0."""

    router_pd_selection: Annotated[PdSelection, Setting(SettingGroup.ROUTING)] = PdSelection.SEQUENTIAL
    """How a prefill and a decode worker are picked: prefill first and decode for its KV, or both together by
    what the pair costs. Together, a decode worker may also prefill for itself where that is sooner. It needs
    the cost of time."""

    router_price_weight: Annotated[NonNegative, Setting(SettingGroup.ROUTING, unit="seconds")] = 0.0
    """Under the cost of time, how many seconds of waiting one unit of the links' prices is worth: KV crosses
    a link that has a price where that saves more. At 0 prices change nothing."""

    router_decode_weight: Annotated[NonNegative, Setting(SettingGroup.ROUTING, unit="tokens")] = 8.0
    """Under the cost of time, for how many tokens of its answer a request weighs how long a decode step takes
    on a worker. Higher favours even load and the time between tokens over the time to the first."""

    router_timing: Annotated[Annotated[str, MinLen(1)] | None, Setting(SettingGroup.ROUTING)] = None
    """A file that `kvrouter calibrate` wrote: how long a step of these engines takes, which predictions begin
    with under the cost of time, until each worker's own speed is learned. Unset: that of vLLM with a model of
    8 billion parameters on one large GPU."""

    overlap_score_weight: Annotated[
        NonNegative,
        Setting(
            SettingGroup.ROUTING,
            flag="--kv-overlap-score-weight",
            variable="DYN_KV_OVERLAP_SCORE_WEIGHT",
            aliases=Aliases(
                flags=("--router-kv-overlap-score-weight",),
                variables=("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT"),
                names=("kv_overlap_score_weight",),
            ),
        ),
    ] = 1.0
    """What a block that must be prefilled weighs against a block being decoded. Higher favours cache hits
    and the time to first token, lower favours even load. At 0 no index is built. Stated, also as 1.0, it
    means the cost of blocks; with `--router-cost time` it is a factor on the seconds of queue and prefill."""

    router_temperature: Annotated[
        NonNegative, Setting(SettingGroup.ROUTING, variable="DYN_ROUTER_TEMPERATURE")
    ] = 0.0
    """How random the pick is. At 0 the lowest cost wins; above, workers are drawn by softmax over costs that
    are normalised by their range."""

    kv_events: Annotated[
        Switch,
        Setting(
            SettingGroup.ROUTING,
            variable="DYN_ROUTER_USE_KV_EVENTS",
            aliases=Aliases(
                flags=("--router-kv-events",), variables=("DYN_KV_EVENTS",), names=("use_kv_events",)
            ),
        ),
    ] = True
    """Follow the workers' KV events to know which blocks they hold. Without them the router predicts the
    caches from its own decisions."""

    track_active_blocks: Annotated[
        Switch,
        Setting(
            SettingGroup.ROUTING,
            variable="DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
            aliases=Aliases(
                flags=("--router-track-active-blocks",),
                variables=("DYN_TRACK_ACTIVE_BLOCKS",),
                names=("router_track_active_blocks",),
            ),
        ),
    ] = True
    """Count the blocks of running requests as load. Of no use where workers only prefill."""

    track_prefill_tokens: Annotated[
        Switch,
        Setting(
            SettingGroup.ROUTING,
            variable="DYN_ROUTER_TRACK_PREFILL_TOKENS",
            aliases=Aliases(
                flags=("--router-track-prefill-tokens",),
                variables=("DYN_TRACK_PREFILL_TOKENS",),
                names=("router_track_prefill_tokens",),
            ),
        ),
    ] = True
    """Count the tokens that wait for prefill as load."""

    decisions_kept: Annotated[
        Annotated[Whole, Interval(ge=0, le=1000000)], Setting(SettingGroup.ROUTING, unit="requests")
    ] = 1000
    """Of how many of the last requests the decisions can be read back by request id."""

    router_min_initial_workers: Annotated[
        Count, Setting(SettingGroup.ROUTING, variable="DYN_ROUTER_MIN_INITIAL_WORKERS", unit="workers")
    ] = 0
    """How many workers must have registered before the router says that it accepts requests and is ready: the
    first one of a fleet that starts would get them all. Once so many were here, later losses change nothing.
    At 0 it waits for none. Requests that come all the same are answered."""

    active_decode_blocks_threshold: Annotated[
        Fraction | None,
        Setting(
            SettingGroup.BUSY,
            variable="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
            unit="fraction of the worker's blocks",
            aliases=Aliases(
                flags=("--busy-threshold",), variables=("DYN_BUSY_THRESHOLD",), names=("busy_threshold",)
            ),
        ),
    ] = None
    """A worker whose running requests hold more than this part of its KV blocks is busy and gets no new ones.
    Judged on its latest load report and what was booked since, never on less than what the router has booked
    there itself: one request may go over it, the next one goes elsewhere. Unset: never busy by blocks."""

    active_prefill_tokens_threshold: Annotated[
        Count | None,
        Setting(SettingGroup.BUSY, variable="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", unit="tokens"),
    ] = None
    """A worker with more tokens than this waiting for prefill is busy. Judged as the threshold of blocks is,
    and on the router's own count where its engine does not report it (vLLM, TensorRT-LLM). Unset: never
    busy by tokens."""

    admission_queue_max: Annotated[Count, Setting(SettingGroup.BUSY, unit="requests")] = 0
    """How many requests may wait while every eligible worker is busy. At 0 they are refused at once."""

    admission_wait_s: Annotated[NonNegative, Setting(SettingGroup.BUSY, unit="seconds")] = 0.0
    """How long a request may wait for a worker that is not busy."""

    router_queue_policy: Annotated[
        QueuePolicy,
        refusing(FOREIGN_QUEUE_POLICIES),
        Setting(SettingGroup.BUSY, variable="DYN_ROUTER_QUEUE_POLICY"),
    ] = QueuePolicy.FCFS
    """Which waiting request goes first, among those of equal priority: the one that came first (`fcfs`); the
    one with the least prompt to compute (`shortest`), which lets others pass that come within ten times the
    time of its own prefill, and no later ones; the one whose `slo_ttft_ms` or time limit ends first
    (`deadline`)."""

    slo_ttft_ms: Annotated[PositiveCount | None, Setting(SettingGroup.BUSY, unit="milliseconds")] = None
    """The time to the first token, from a request's arrival, within which its answer is of use. A request for
    which more is predicted is refused at once, with 429 and the seconds after which to try again; those with
    a `strict_priority` above 0 are refused last. `slo_ttft_ms` of a request counts instead. Times are
    predicted under the cost of time alone. Unset: only requests with one of their own are refused."""

    kv_transfer_topology_level: Annotated[
        Annotated[str, MaxLen(63)] | None,
        Setting(SettingGroup.TOPOLOGY, variable="DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL"),
    ] = None
    """The topology domain that KV transfers keep to, for prefill workers that publish no policy of their own.
    Unset: such workers are not constrained."""

    kv_transfer_mismatch_policy: Annotated[
        MismatchPolicy, Setting(SettingGroup.TOPOLOGY, variable="DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY")
    ] = MismatchPolicy.FAIL
    """What happens under the topology level when no decode worker shares the prefill worker's domain: refuse
    the request, or warn, count it and cross the boundary."""

    kv_transfer_weight: Annotated[NonNegative, Setting(SettingGroup.TOPOLOGY, unit="blocks per second")] = 0.0
    """What one second of expected KV transfer costs a decode worker, in blocks. At 0, or without a link
    table, the links are not weighed."""

    router_links: Annotated[Annotated[str, MinLen(1)] | None, Setting(SettingGroup.TOPOLOGY)] = None
    """The links between workers that decisions weigh: JSON as `topology.links` of a fleet file has them,
    `{"within": {"zone": {"latency_s": 0.0005, "bandwidth_bytes_per_s": 12.5e9}}}`, or the path of a file with
    that in YAML, which is read again when it changes. Unset: those of the fleet file. Without any, the cost
    of time begins with 25 Gbit/s between all workers."""

    router_learned_file: Annotated[Annotated[str, MinLen(1)] | None, Setting(SettingGroup.TOPOLOGY)] = None
    """A file in which what was learned of links and workers is kept over restarts: it is written every 30
    seconds and at the end, and read at the start. Unset: a router that starts learns of links from its
    replicas, with --router-replica-sync, else from its own requests alone."""

    router_prefill_level: Annotated[
        Annotated[str, MinLen(1), MaxLen(63)] | None, Setting(SettingGroup.TOPOLOGY)
    ] = None
    """The topology domain in which prefill keeps near the frontend: to workers that have the frontend's own
    value of it, which it reads as workers do. Unset: prefill may be anywhere."""

    router_prefill_enforcement: Annotated[NearEnforcement, Setting(SettingGroup.TOPOLOGY)] = (
        NearEnforcement.PREFERRED
    )
    """How strictly prefill keeps near the frontend: requests that cannot are refused, or workers that are
    near cost less."""

    router_prefill_weight: Annotated[Fraction, Setting(SettingGroup.TOPOLOGY)] = 0.6
    """How much less workers near the frontend cost for prefill where that is preferred: their cost is
    multiplied by exp(-tanh(weight)), 0.58 at 0.6."""

    router_domain_wait_s: Annotated[
        NonNegative,
        Setting(
            SettingGroup.TOPOLOGY,
            flag="--router-domain-wait",
            variable="KVROUTER_ROUTER_DOMAIN_WAIT",
            unit="seconds",
        ),
    ] = 0.0
    """How long a request waits for a decode worker to join the prefill worker's domain before it is refused,
    where the domain is required. Nothing is dispatched while it waits."""

    router_ttl_s: Annotated[
        Positive,
        Setting(
            SettingGroup.CACHE,
            flag="--router-ttl",
            variable="DYN_ROUTER_TTL",
            unit="seconds",
            aliases=Aliases(
                flags=("--router-ttl-secs",),
                variables=("DYN_ROUTER_TTL_SECS",),
                names=("router_ttl_secs", "router_ttl"),
            ),
        ),
    ] = 120.0
    """How long a predicted block is believed in. Where KV events are followed, only what comes after images
    and prompts that cannot be read are predicted."""

    router_max_tree_size: Annotated[
        PositiveCount, Setting(SettingGroup.CACHE, variable="DYN_ROUTER_MAX_TREE_SIZE", unit="blocks")
    ] = 2**20
    """How many predicted blocks are kept; above, the least recently used are pruned."""

    router_rank_blocks_max: Annotated[PositiveCount, Setting(SettingGroup.CACHE, unit="blocks")] = 2**24
    """How many blocks are believed of one rank in one medium, from its KV events. Where its worker's card
    says how many blocks it has, twice as many are believed on the GPU and 64 times as many in each other
    medium, at most this; a load report that gives more blocks than the card counts instead, up to four
    times the card's number. All ranks of one worker together have four times this, each an equal share. A
    rank that reports more is emptied, scores nothing (``over_limit``) and is asked again after a minute."""

    router_prune_target_ratio: Annotated[
        Annotated[Finite, Interval(gt=0, le=1)],
        Setting(SettingGroup.CACHE, variable="DYN_ROUTER_PRUNE_TARGET_RATIO", unit="fraction of the maximum"),
    ] = 0.8
    """The size that pruning goes down to."""

    retries_max: Annotated[
        Annotated[Whole, Interval(ge=0, le=10)],
        Setting(
            SettingGroup.RECOVERY,
            unit="dispatches",
            aliases=Aliases(
                flags=("--migration-limit",), variables=("DYN_MIGRATION_LIMIT",), names=("migration_limit",)
            ),
        ),
    ] = 2
    """How often a request may be sent elsewhere after a worker failed it. Low, so that one poisonous prompt
    cannot take a fleet down."""

    retry_bodies_max_bytes: Annotated[PositiveCount, Setting(SettingGroup.RECOVERY, unit="bytes")] = (
        512 * 1024 * 1024
    )
    """What the bodies of running requests may hold together that engines get as they were written, and that
    are kept to be sent again. When it is full the largest one is dropped: its request is not sent again, and
    one that was not sent yet is answered with 503 `retry_bodies_full`."""

    ttft_timeout_s: Annotated[Positive | None, Setting(SettingGroup.RECOVERY, unit="seconds")] = None
    """How long a request may take to its first token before it fails. Unset: as long as the whole request
    may, which is also what an answer may take that is not streamed by an engine that is given the call as it
    was written: it brings nothing before all of it is there."""

    stall_timeout_s: Annotated[Positive, Setting(SettingGroup.RECOVERY, unit="seconds")] = 60.0
    """How long an answer that has begun may stay without a next token. Then its worker counts as lost, and
    the answer goes on elsewhere where it can."""

    request_timeout_s: Annotated[Positive, Setting(SettingGroup.RECOVERY, unit="seconds")] = 600.0
    """How long a request may take in all; then it fails and its workers are asked to stop."""

    circuit_failures: Annotated[Count, Setting(SettingGroup.RECOVERY, unit="failures in a row")] = 3
    """After how many failures in a row a worker is passed over, as long as somebody else may take a request:
    it could not be reached, it failed a request that another one answers, or brought nothing in time. At 0
    nobody is passed over, nor is a pair of workers whose KV was lost."""

    circuit_open_s: Annotated[Positive, Setting(SettingGroup.RECOVERY, unit="seconds")] = 5.0
    """How long a worker is passed over before one request tries it; twice as long each time that one fails
    too. A pair whose KV was lost likewise."""

    circuit_open_max_s: Annotated[Positive, Setting(SettingGroup.RECOVERY, unit="seconds")] = 60.0
    """The longest time that a worker is passed over before one request tries it again."""

    replica_sync: Annotated[
        Switch,
        Setting(
            SettingGroup.REPLICAS,
            flag="--router-replica-sync",
            variable="DYN_ROUTER_REPLICA_SYNC",
            aliases=Aliases(names=("router_replica_sync",)),
        ),
    ] = False
    """Report to the other routers of the namespace, over NATS, which requests run where, and count theirs as
    load too. Without it each router knows its own requests alone. Cached blocks are not shared this way:
    every router hears the workers' KV events itself."""

    replica_name: Annotated[
        PlainName | None, Setting(SettingGroup.REPLICAS, flag="--router-replica-name")
    ] = None
    """What this router is called at NATS, for an operator who looks there: its consumers begin with the
    name, and end with letters that each start draws. Unset: the host's name and the HTTP port."""

    snapshot_threshold: Annotated[
        PositiveCount,
        Setting(
            SettingGroup.REPLICAS,
            flag="--router-snapshot-threshold",
            variable="DYN_ROUTER_SNAPSHOT_THRESHOLD",
            unit="messages",
            aliases=Aliases(names=("router_snapshot_threshold",)),
        ),
    ] = 1_000_000
    """With more messages than this in the JetStream stream, one router saves the index to the object store
    and purges what the saved index covers."""

    reset_states: Annotated[
        Switch,
        Setting(
            SettingGroup.REPLICAS,
            flag="--router-reset-states",
            variable="DYN_ROUTER_RESET_STATES",
            aliases=Aliases(names=("router_reset_states",)),
        ),
    ] = False
    """At start, empty the JetStream stream and delete the saved index. Only for the first router of a
    component: routers that run already would lose what they have not read. A new namespace is the safer
    clean slate."""

    @property
    def cost(self) -> str:
        """The cost of a worker: the stated one, else the one that stated weights ask for."""
        return self._cost_and_reason[0]

    @property
    def cost_reason(self) -> str:
        """Why the cost is this one."""
        return self._cost_and_reason[1]

    @property
    def _cost_and_reason(self) -> tuple[str, str]:
        if self.router_cost is not None:
            return self.router_cost, "router_cost is stated"
        if self.router_pd_selection is PdSelection.JOINT:
            return TIME, "router_pd_selection is joint"
        if "overlap_score_weight" in self.model_fields_set:  # also where the stated weight is the default's
            return BLOCKS, "overlap_score_weight is stated"
        if self.kv_transfer_weight > 0.0:
            return BLOCKS, "kv_transfer_weight is stated"
        return TIME, "default"
