"""The plan: from a deployment to manifests."""

from kvrouter.operator.plan.budgets import has_budgets, hold_ends_s, zone_budgets
from kvrouter.operator.plan.cordons import cordon_manifests, node_cordon
from kvrouter.operator.plan.defaults import PlanDefaults, SecretKey
from kvrouter.operator.plan.links import level_problems, read_qos
from kvrouter.operator.plan.manifest import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    MANAGER,
    TEMPLATE_HASH,
    TYPE_LABEL,
    Manifest,
    fleet_name,
    object_name,
    selector,
)
from kvrouter.operator.plan.packing import PACKING_ANNOTATION
from kvrouter.operator.plan.plan import LEVELS_ANNOTATION, QOS_ANNOTATION, Plan, plan, read_levels
from kvrouter.operator.plan.serving import registers_elsewhere
from kvrouter.operator.plan.wiring import prefill_problem

__all__ = [
    "COMPONENT_LABEL",
    "DEPLOYMENT_LABEL",
    "LEVELS_ANNOTATION",
    "MANAGER",
    "PACKING_ANNOTATION",
    "QOS_ANNOTATION",
    "TEMPLATE_HASH",
    "TYPE_LABEL",
    "Manifest",
    "Plan",
    "PlanDefaults",
    "SecretKey",
    "cordon_manifests",
    "fleet_name",
    "has_budgets",
    "hold_ends_s",
    "level_problems",
    "node_cordon",
    "object_name",
    "plan",
    "prefill_problem",
    "read_levels",
    "read_qos",
    "registers_elsewhere",
    "selector",
    "zone_budgets",
]
