"""DomainBalanced, and what columns show: prefill and decode workers of each domain."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import JsonValue

from kvrouter.core.workers import KvFormat, Role
from kvrouter.kernel.topology.policy import Required
from kvrouter.operator.api.status import ConditionStatus, DeploymentStatus, DomainStatus
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.status.available import Registered, Workers, serves
from kvrouter.operator.status.domains import balance_of
from kvrouter.operator.status.finding import events_of
from tests.testing.deployment_statuses import (
    FALSE,
    REQUIRED,
    TRUE,
    UNKNOWN,
    condition,
    pods,
    status,
    status_and_reason,
    worker,
)
from tests.testing.planned_deployments import deployment


def test_domains_with_prefill_and_decode_are_balanced() -> None:
    found = status(pods(a=(2, 3), b=(1, 1)))
    assert status_and_reason(found, "DomainBalanced") == (TRUE, "DomainsBalanced")
    assert found.balance == "a 2/3, b 1/1"
    assert found.domains == (
        DomainStatus(value="a", prefill=2, decode=3),
        DomainStatus(value="b", prefill=1, decode=1),
    )


@pytest.mark.parametrize(
    ("more", "consequence"),
    [
        ({}, "Requests go to prefill workers of other domains, and get 503 while there are none."),
        ({"enforcement": "fallback"}, "Their KV leaves its zone."),
        ({"enforcement": "preferred", "preferredWeight": 0.5}, "Their KV leaves its zone."),
    ],
)
def test_domain_without_decode_is_reported_first_with_its_consequence(
    more: dict[str, JsonValue], consequence: str
) -> None:
    found = status(pods(a=(2, 3), b=(4, 0), c=(0, 1)), policy={**REQUIRED, **more})
    assert status_and_reason(found, "DomainBalanced") == (FALSE, "DomainWithoutDecode")
    assert condition(found, "DomainBalanced").message == (
        f"zone b: prefill workers, and no Ready decode worker. {consequence} "
        "Let decode workers be scheduled there, or take the prefill workers away."
    )
    assert found.balance == "b 4/0, a 2/3, c 0/1"


def test_pods_not_ready_or_leaving_do_not_count_for_balance() -> None:
    gone = [worker("decode", "a", 8, ready=False, stuck=True), worker("decode", "a", 9, over=True)]
    assert status_and_reason(status([*pods(a=(1, 0)), *gone]), "DomainBalanced") == (
        FALSE,
        "DomainWithoutDecode",
    )


STARTS = worker("decode", "a", 8, ready=False)
PREFILLS = worker("prefill", "a")
DECODES = worker("decode", "a")
ELSEWHERE = worker("decode", "b")
PENDING = Pod("decode-9", labels={"kvrouter.dev/component-type": "decode"})


@pytest.mark.parametrize(
    ("steps", "reported"),
    [
        # At a start: pods are created, bound, labelled and Ready in any order.
        ([[PREFILLS]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, PENDING]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, worker("decode", None, ready=False)]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, STARTS]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, STARTS], [PREFILLS, STARTS]], (UNKNOWN, "DecodeStarting")),
        ([[PREFILLS, STARTS], [PREFILLS, DECODES]], (TRUE, "DomainsBalanced")),
        # Nobody starts there.
        ([[PREFILLS, ELSEWHERE]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, worker("decode", "b", ready=False)]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, worker("decode", "", ready=False)]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, worker("decode", "a", ready=False, stuck=True)]], (FALSE, "DomainWithoutDecode")),
        # A domain that had decode workers loses them, whoever starts in their place.
        ([[PREFILLS, DECODES], [PREFILLS, STARTS]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, DECODES], [PREFILLS]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, DECODES], [PREFILLS], [PREFILLS, STARTS]], (FALSE, "DomainWithoutDecode")),
        ([[PREFILLS, DECODES], [PREFILLS, STARTS], [PREFILLS, DECODES]], (TRUE, "DomainsBalanced")),
        # One without anybody, and one that starts.
        ([[PREFILLS, STARTS, worker("prefill", "b")]], (FALSE, "DomainWithoutDecode")),
    ],
)
def test_domain_that_only_starts_is_not_reported_to_lack_decode(
    steps: list[list[Pod]], reported: tuple[ConditionStatus, str]
) -> None:
    found: DeploymentStatus | None = None
    for pods_there in steps:
        found = status(pods_there, previous=found)
    assert found is not None
    assert status_and_reason(found, "DomainBalanced") == reported
    if reported == (UNKNOWN, "DecodeStarting"):
        assert reported[1] not in [event.reason for event in events_of(None, found)]


def test_message_of_lacking_decode_leaves_out_a_starting_domain() -> None:
    message = condition(status([PREFILLS, STARTS, worker("prefill", "b")]), "DomainBalanced").message
    assert message.startswith("zone b: prefill workers, and no Ready decode worker.")


def test_earlier_status_of_another_domain_level_does_not_count() -> None:
    racks = {**REQUIRED, "domain": "rack"}
    labels = {"grove.io/topology.rack": "a"}
    prefill, decode = (
        Pod(f"{kind}-r", labels={"kvrouter.dev/component-type": kind, **labels}, is_ready=kind == "prefill")
        for kind in ("prefill", "decode")
    )
    before = status([PREFILLS, DECODES])
    assert status_and_reason(status([prefill, decode], policy=racks, previous=before), "DomainBalanced") == (
        UNKNOWN,
        "DecodeStarting",
    )


def test_aggregated_workers_count_as_decode_workers() -> None:
    assert status([*pods(a=(1, 0)), worker("worker", "a")]).balance == "a 1/1"


def test_workers_whose_place_is_unknown_are_named() -> None:
    found = status([*pods(a=(1, 1)), worker("decode", "", 5)])
    assert condition(found, "DomainBalanced").message.endswith(
        ". The place of 1 Ready workers is unknown: decode--5"
    )


def test_decode_workers_in_a_domain_without_prefill_are_reported() -> None:
    assert "Decode workers of c" in condition(status(pods(a=(1, 1), c=(0, 2))), "DomainBalanced").message


def test_domain_balanced_is_unknown_before_prefill_workers_are_ready() -> None:
    assert status_and_reason(status([]), "DomainBalanced") == (UNKNOWN, "NoReadyPrefill")


def test_a_fleet_without_prefill_is_always_balanced() -> None:
    of = deployment(policy=REQUIRED, types=("frontend", "worker"))
    assert status_and_reason(status([worker("worker", "a")], of=of), "DomainBalanced") == (
        TRUE,
        "NotDisaggregated",
    )


def registered(role: Role, zone: str, version: str, **fields: Any) -> Registered:
    return Registered("m", role, domains={"zone": zone}, kv_format=KvFormat(version=version), **fields)


OLD_A, NEW_A = registered(Role.PREFILL, "a", "old"), registered(Role.DECODE, "a", "new")


def test_a_domain_where_no_pair_can_talk_is_reported_with_its_consequence() -> None:
    of_b = registered(Role.PREFILL, "b", "new"), registered(Role.BOTH, "b", "new")
    found = status(pods(a=(1, 1), b=(1, 1)), workers=Workers((OLD_A, NEW_A, *of_b)))
    assert status_and_reason(found, "DomainBalanced") == (FALSE, "DomainWithoutPair")
    assert condition(found, "DomainBalanced").message == (
        "zone a: no decode worker can take the KV of a prefill worker there, of another engine, version or "
        "connector. Requests go to prefill workers of other domains, and get 503 while there are none. "
        "Upgrade both roles of a zone together."
    )


@pytest.mark.parametrize(
    "more",
    [
        registered(Role.DECODE, "a", "old"),
        registered(Role.PREFILL, "a", "new"),
        registered(Role.DECODE, "a", ""),
    ],
)
def test_a_domain_with_one_pair_that_can_talk_is_balanced(more: Registered) -> None:
    found = status(pods(a=(1, 1)), workers=Workers((OLD_A, NEW_A, more)))
    assert status_and_reason(found, "DomainBalanced") == (TRUE, "DomainsBalanced")


@pytest.mark.parametrize(
    ("leaving", "reported"),
    [
        (OLD_A, (TRUE, "DomainsBalanced")),
        (replace(NEW_A, kv_format=OLD_A.kv_format), (FALSE, "DomainWithoutPair")),
    ],
)
def test_workers_that_take_no_requests_are_no_partners(
    leaving: Registered, reported: tuple[ConditionStatus, str]
) -> None:
    there = [each for each in (OLD_A, NEW_A) if each is not leaving]
    found = status(pods(a=(1, 1)), workers=Workers((*there, replace(leaving, takes_requests=False))))
    assert status_and_reason(found, "DomainBalanced") == reported


def test_a_domain_without_a_pair_does_not_end_the_start_of_another() -> None:
    there = [*pods(b=(1, 1)), PREFILLS, STARTS]
    of_b = [replace(each, domains={"zone": "b"}) for each in (OLD_A, NEW_A)]
    found: DeploymentStatus | None = None
    for _ in range(2):
        found = status(there, previous=found, workers=Workers(of_b))
        assert status_and_reason(found, "DomainBalanced") == (FALSE, "DomainWithoutPair")


def test_available_under_required_needs_a_pair_that_can_talk() -> None:
    policy = Required("zone")
    assert not serves([replace(OLD_A, policy=policy), NEW_A], None)
    assert serves([replace(OLD_A, policy=policy), NEW_A, registered(Role.DECODE, "a", "old")], None)


def test_balance_text_and_domain_list_are_cut_at_their_limits() -> None:
    domains = [DomainStatus(value=f"zone-{number:03}", prefill=1, decode=1) for number in range(300)]
    text = balance_of(domains)
    assert text is not None
    assert len(text) <= 256
    assert text.endswith(" more")
    assert balance_of(()) is None
    many = status(pods(**{f"zone{number}": (1, 1) for number in range(300)}))
    assert len(many.domains) == 256
