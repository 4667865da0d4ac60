"""The one line that registers the toy engine, as a pytest plugin: it comes before everything else."""

from kvrouter.engines.registry import ENGINES

ENGINES["toy"] = "tests.testing.toy_engine"
