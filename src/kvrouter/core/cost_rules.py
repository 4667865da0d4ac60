"""The registry of cost rules, which rate worker ranks: one line for each.

A rule is a module with ``RULE``, a :class:`kvrouter.kernel.routing.interface.CostRule`. It is imported when a
router first uses it.
"""

from typing import Final

BLOCKS: Final = "blocks"
TIME: Final = "time"

COST_RULES = {
    BLOCKS: "kvrouter.kernel.routing.costs.blocks",
    TIME: "kvrouter.kernel.routing.costs.time",
    "lmetric": "kvrouter.kernel.routing.costs.lmetric",
}
"""Modules by rule name; the names are values of ``--router-cost``."""

JOINT: Final = "joint"
"""The cost of time, with prefill and decode worker picked jointly."""


def cost_choices() -> tuple[str, ...]:
    """Return all values of ``--router-cost``: the rules, and the joint pick of pairs."""
    return tuple(name for rule in COST_RULES for name in ((rule, JOINT) if rule == TIME else (rule,)))
