"""The paths of pages that both the router's routes and its client name."""

MODELS = "/v1/models"
EXPLAIN = "/v1/route/explain"
DECISIONS = "/v1/decisions"
FLEET = "/v1/fleet"
FLOWS = "/v1/flows"
CORDONS = "/v1/cordons"
METRICS = "/metrics"
