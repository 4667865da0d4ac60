"""The registry of cost rules, by which a rank is the cheapest: one line for each.

A rule is a module with ``RULE``, a :class:`kvrouter.kernel.routing.request.CostRule`. It is imported when a
router decides by it.
"""

from typing import Final

BLOCKS: Final = "blocks"
TIME: Final = "time"

COST_RULES = {
    BLOCKS: "kvrouter.kernel.routing.costs.blocks",
    TIME: "kvrouter.kernel.routing.costs.time",
    "lmetric": "kvrouter.kernel.routing.costs.lmetric",
}
"""Modules by the rule's name: the values of ``--router-cost``."""

JOINT: Final = "joint"
"""The cost of time, by which the pair is picked together."""


def cost_choices() -> tuple[str, ...]:
    """Return every way in which costs pick: the rules, and pairs that are picked together."""
    return tuple(name for rule in COST_RULES for name in ((rule, JOINT) if rule == TIME else (rule,)))
