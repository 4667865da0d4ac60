"""The one line that registers the toy cost rule, as a pytest plugin: it comes before everything else."""

from kvrouter.core.cost_rules import COST_RULES

COST_RULES["toy"] = "tests.testing.toy_cost"
