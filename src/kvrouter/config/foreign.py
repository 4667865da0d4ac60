"""Names that Dynamo's users bring and that set nothing here: each says so, and what there is instead.

A name with a value that asks for what is done anyway is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrouter.config.setting import Kind, parse_switch

NOT_SET = ("", "none")
"""The texts with which a variable or a flag of Dynamo's says that it sets nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One of Dynamo's settings: its field, flags and variables. ``met`` are the values with which it asks for
    what is done here anyway.
    """

    name: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    kind: Kind
    met: tuple[object, ...] = ()
    why: str

    @property
    def told(self) -> str:
        """What is said of it, after its name."""
        return f"has no effect here: {self.why}"

    def is_met_by(self, value: object) -> bool:
        """Whether ``value`` asks for nothing that is not done anyway."""
        return value is None or any(type(each) is type(value) and each == value for each in self.met)

    def is_met_by_text(self, text: str) -> bool:
        """Whether the text of a flag or a variable does."""
        text = text.strip()
        if text.lower() in NOT_SET:
            return True
        try:
            if self.kind is Kind.SWITCH:
                return self.is_met_by(parse_switch(text))
            if self.kind is Kind.WHOLE:
                return self.is_met_by(int(text))
            if self.kind is Kind.NUMBER:
                return self.is_met_by(float(text))
        except ValueError:
            return False
        return self.is_met_by(text)


def _router(name: str, kind: Kind, why: str, *met: object, older: tuple[str, str] | None = None) -> Foreign:
    """A setting whose flag and variable follow from its field's name; ``older`` are those of another era."""
    stem = name.removeprefix("router_")
    flag, variable = f"--router-{stem.replace('_', '-')}", f"DYN_ROUTER_{stem.upper()}"
    return Foreign(
        name=name,
        flags=(flag,) if older is None else (flag, older[0]),
        variables=(variable,) if older is None else (variable, older[1]),
        kind=kind,
        met=met,
        why=why,
    )


def _plain(name: str, kind: Kind, why: str, *met: object) -> Foreign:
    flag, variable = f"--{name.replace('_', '-')}", f"DYN_{name.upper()}"
    return Foreign(name=name, flags=(flag,), variables=(variable,), kind=kind, met=met, why=why)


_CREDIT = "one weight, --kv-overlap-score-weight, says what overlap is worth"
_TIERS = "only blocks on the GPU count as overlap"
_QUEUE = "waiting requests stand in one line, which --admission-queue-max and --admission-wait-s bound"
_POLICIES = "the decision is one formula, and there are no policy classes"
_TRACKING = "routers agree on the blocks of requests by hashes that everybody may compute"
_SPLIT = "where prefill workers are, every prompt is split"
_SESSIONS = "requests of one session are not kept together"
_INDEXERS = "every router keeps an index of its own, or none"

FOREIGN: tuple[Foreign, ...] = (
    _router("router_queue_threshold", Kind.NUMBER, _QUEUE),
    _router("router_queue_policy", Kind.TEXT, _QUEUE, "fcfs"),
    _router("router_policy_config", Kind.TEXT, _POLICIES),
    _router("router_prefill_policy", Kind.TEXT, _POLICIES, "default"),
    _router("router_decode_policy", Kind.TEXT, _POLICIES, "default"),
    _router(
        "router_assume_kv_reuse",
        Kind.SWITCH,
        "cached blocks are always taken to be used again",
        True,
        older=("--assume-kv-reuse", "DYN_ASSUME_KV_REUSE"),
    ),
    _router(
        "router_track_output_blocks",
        Kind.SWITCH,
        "blocks of output always count as load where active blocks do",
        True,
        older=("--track-output-blocks", "DYN_TRACK_OUTPUT_BLOCKS"),
    ),
    Foreign(
        name="durable_kv_events",
        flags=("--router-durable-kv-events", "--durable-kv-events"),
        variables=("DYN_ROUTER_DURABLE_KV_EVENTS", "DYN_DURABLE_KV_EVENTS"),
        kind=Kind.SWITCH,
        met=(False,),
        why="each worker chooses how its KV events travel, by --event-plane jetstream",
    ),
    _router("router_event_threads", Kind.WHOLE, "KV events are applied by the event loop, in steps", 1, 4),
    _router("router_prefill_load_model", Kind.TEXT, "what waits for prefill counts in full", "none"),
    Foreign(
        name="prefill_load_scale",
        flags=("--router-prefill-load-scale",),
        variables=("DYN_ROUTER_PREFILL_LOAD_SCALE",),
        kind=Kind.NUMBER,
        met=(1.0,),
        why=_CREDIT,
    ),
    Foreign(
        name="overlap_score_credit",
        flags=("--router-kv-overlap-score-credit",),
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",),
        kind=Kind.NUMBER,
        met=(1.0,),
        why=_CREDIT,
    ),
    Foreign(
        name="overlap_score_credit_decay",
        flags=("--router-kv-overlap-score-credit-decay",),
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",),
        kind=Kind.NUMBER,
        met=(0.0,),
        why=_CREDIT,
    ),
    _router("decode_active_request_weight", Kind.NUMBER, "load is counted in blocks, not in requests", 0.0),
    _router("host_cache_hit_weight", Kind.NUMBER, _TIERS, 0.0),
    _router("disk_cache_hit_weight", Kind.NUMBER, _TIERS, 0.0),
    _plain("shared_cache_multiplier", Kind.NUMBER, _TIERS, 0.0),
    _plain("shared_cache_type", Kind.TEXT, _TIERS, "none"),
    _router("router_predicted_ttl_secs", Kind.NUMBER, "where KV events are followed, no cache is predicted"),
    _router("router_approximate_cache_policy", Kind.TEXT, "predicted blocks end with their time", "ttl"),
    _router("router_tracking_hash", Kind.TEXT, _TRACKING, "public-xxh3-v1"),
    _router("router_tracking_key_file", Kind.TEXT, _TRACKING),
    _router("router_tracking_key_id", Kind.TEXT, _TRACKING),
    _router("router_session_affinity_ttl_secs", Kind.NUMBER, _SESSIONS),
    _router("router_session_affinity_mode", Kind.TEXT, _SESSIONS),
    _plain("enable_session_prefix_index", Kind.SWITCH, _SESSIONS, False),
    _plain("use_remote_indexer", Kind.SWITCH, _INDEXERS, False),
    _plain("serve_indexer", Kind.SWITCH, _INDEXERS, False),
    Foreign(
        name="load_aware",
        flags=("--load-aware",),
        variables=("DYN_ROUTER_LOAD_AWARE",),
        kind=Kind.SWITCH,
        met=(False,),
        why="--kv-overlap-score-weight 0 leaves caches out of the decision, and the load of prefill too",
    ),
    Foreign(
        name="conditional_disagg_enabled",
        flags=("--router-conditional-disagg",),
        variables=("DYN_ROUTER_CONDITIONAL_DISAGG",),
        kind=Kind.SWITCH,
        met=(False,),
        why=_SPLIT,
    ),
    _router("conditional_disagg_config", Kind.TEXT, _SPLIT),
    _plain(
        "enforce_disagg",
        Kind.SWITCH,
        "a decode worker serves whole requests where no prefill worker is there",
        False,
    ),
    _plain(
        "active_prefill_tokens_threshold_frac",
        Kind.NUMBER,
        "--active-prefill-tokens-threshold is a number of tokens",
    ),
    _plain("admission_control", Kind.TEXT, "the thresholds themselves switch it on", "token-capacity"),
    _plain("kv_cache_block_size", Kind.WHOLE, "each worker announces the size of its blocks"),
    _plain("namespace_prefix", Kind.TEXT, "a router serves one namespace, --namespace"),
    _plain("migration_max_seq_len", Kind.WHOLE, "an answer of any length may go on elsewhere"),
)
"""All of them, by what they are about."""

FOREIGN_VARIABLES: Mapping[str, Foreign] = {
    variable: foreign for foreign in FOREIGN for variable in foreign.variables
}
FOREIGN_FIELDS: Mapping[str, Foreign] = {foreign.name: foreign for foreign in FOREIGN}
