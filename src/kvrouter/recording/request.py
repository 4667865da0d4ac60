"""The fields of an ended request, as the recorder takes them: tuples, which cost the event loop least.

The fields mean the same as in :mod:`kvrouter.recording.schema`, except that times are on the recorder's
clock, and None or 0 for an event that did not happen.
"""

from collections.abc import Mapping

import msgspec

from kvrouter.core.ids import WorkerRank
from kvrouter.recording.schema import Constraints

LegFields = tuple[
    str, WorkerRank, int, Mapping[str, str], int, float | None, float | None, float | None, int | None
]
"""``leg``, the worker's rank, ``overlap_blocks``, ``domains``, ``candidates``, ``sent_s``, ``first_token_s``,
``last_s``, ``cached_tokens``. The domains are a dict.
"""

AttemptFields = tuple[
    str,
    str,
    float,
    tuple[LegFields, ...],
    int | None,
    bool,
    str | None,
    bool,
    bool,
    bool,
    str | None,
    str | None,
]
"""``shape``, ``mode``, ``placed_s``, ``legs``, ``kv_bytes``, ``kv_bytes_reported``, ``constraint``,
``fallback_used``, ``cross_domain``, ``last_resort``, ``lost``, ``kv_lost``.
"""

RequestFields = tuple[
    str,
    str | None,
    bool,
    int,
    int,
    str,
    str | None,
    float,
    float | None,
    float,
    tuple[AttemptFields, ...],
]
"""``model``, ``adapter``, ``media``, ``max_tokens``, ``output_tokens``, ``status``, ``route``, the arrival,
``first_token_s``, ``ended_s``, ``attempts``.
"""


class RequestDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that few requests have."""

    session: str | None = None
    parent: str | None = None
    by_text: bool = False
    constraints: Constraints | None = None
    code: str | None = None
    http_status: int | None = None
    refusals: Mapping[str, int] = {}
