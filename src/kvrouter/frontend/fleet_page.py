"""``GET /v1/fleet`` as JSON."""

from kvrouter.core.workers import Role, WorkerCard
from kvrouter.frontend.explained import Json, policy_json
from kvrouter.frontend.reading import RankReading, WorkerReading, read_index, read_workers
from kvrouter.service.index_check import Answers
from kvrouter.service.model_router import ModelRouter
from kvrouter.service.router import RouterService
from kvrouter.service.transfer_speed import TransferReading
from kvrouter.topology import RouterTopologyDefault, policy_of, worker_taints


def fleet_json(service: RouterService) -> Json:
    """Every worker with its ranks, every model with its queue and index, and the requests that run."""
    models: list[Json] = []
    workers: list[Json] = []
    for model in service.models():
        of_model = list(read_workers(model))
        models.append(_model_json(model, workers=len(of_model)))
        default = model.settings.topology_default
        workers.extend(
            {**_worker_json(worker, default), "lapsed": service.has_lapsed(worker.card.worker_id)}
            for worker in of_model
        )
    return {
        "discovery": {"reachable": service.store_lost is None, "why": service.store_lost},
        "draining": service.is_draining,
        "running_requests": service.running,
        "models": models,
        "workers": workers,
    }


def _model_json(model: ModelRouter, *, workers: int) -> Json:
    settings, index = model.settings, read_index(model)
    default = settings.topology_default
    return {
        "model": model.fleet.model,
        "block_size": model.fleet.block_size,
        "router_mode": settings.mode.value,
        "workers": workers,
        "worker_ranks": sum(card.dp_size for card in model.fleet),
        "waiting_requests": model.waiting,
        "parted_pairs": [
            {"prefill_worker_id": pair.prefill, "decode_worker_id": pair.decode, "circuit": state.value}
            for pair, state in model.circuits.pairs()
        ],
        "index": None if index is None else {"blocks": index.blocks, "bytes": index.bytes},
        "kv_transfer_default": None if default is None else policy_json(default.policy),
        "active_decode_blocks_threshold": settings.active_decode_blocks_threshold,
        "active_prefill_tokens_threshold": settings.active_prefill_tokens_threshold,
    }


def _worker_json(worker: WorkerReading, default: RouterTopologyDefault | None) -> Json:
    card, config = worker.card, worker.card.runtime_config
    return {
        "worker_id": card.worker_id,
        "model": card.model,
        "role": card.role.value,
        "alive": worker.alive,
        "draining": card.draining,
        "engine": card.engine or None,
        "engine_silent": card.engine_silent,
        "circuit": worker.circuit.value,
        "address": card.address,
        "endpoint": f"{card.namespace}.{card.component}.{card.endpoint}",
        "domains": config.topology_domains,
        "levels": config.topology_levels,
        "taints": sorted(worker_taints(config)),
        "event_lane": card.event_source.lane.value if card.publishes_kv_events else None,
        "kv_transfer": _kv_transfer_json(card, default),
        "ranks": [_rank_json(rank) for rank in worker.ranks],
    }


def _kv_transfer_json(card: WorkerCard, default: RouterTopologyDefault | None) -> Json | None:
    """The policy that holds for KV from this worker; only prefill workers send any."""
    if card.role is not Role.PREFILL:
        return None
    policy = policy_of(card.runtime_config, default)
    return None if policy is None else policy_json(policy)


def _rank_json(rank: RankReading) -> Json:
    report: Json | None = None
    if rank.report_active_blocks is not None:
        report = {
            "active_blocks": rank.report_active_blocks,
            "active_prefill_tokens": rank.report_prefill_tokens,
            "running_requests": rank.report_running_requests,
            "waiting_requests": rank.report_waiting_requests,
        }
    feed: Json | None = None
    if rank.feed is not None and rank.stale_s is not None and rank.silent_s is not None:
        feed = {
            "state": rank.feed.name.lower(),
            "stale_s": round(rank.stale_s, 3),
            "silent_s": round(rank.silent_s, 3),
            "kv_events_missing": rank.kv_events_missing,
        }
    return {
        "dp_rank": rank.rank.dp_rank,
        "active_blocks": rank.active_blocks,
        "prefill_tokens": rank.prefill_tokens,
        "total_blocks": rank.total_blocks,
        "report": report,
        "index_blocks": rank.held_blocks,
        "feed": feed,
        "kv_events_skipped": rank.account.events_skipped,
        "predictions": None if rank.account.answers is None else _predictions_json(rank.account.answers),
        "kv_transfers": None if rank.account.transfers is None else _transfers_json(rank.account.transfers),
    }


def _predictions_json(answers: Answers) -> Json:
    return {
        "answers": answers.n_answers,
        "wrong": answers.n_wrong,
        "wrong_share": round(answers.n_wrong / answers.n_answers, 3),
        "mean_error_blocks": round(answers.mean_error_blocks, 3),
    }


def _transfers_json(transfers: TransferReading) -> Json:
    told = transfers.told
    return {
        "transfers": told.transfers,
        "failed": told.failed,
        "bytes": told.bytes,
        "seconds": round(told.seconds, 3),
        "gb_per_s": _gb_per_s(transfers.recent_bytes_per_s),
        "shown_gb_per_s": _gb_per_s(transfers.shown_bytes_per_s),
        "slow": transfers.is_slow,
    }


def _gb_per_s(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else round(bytes_per_s / 1e9, 3)
