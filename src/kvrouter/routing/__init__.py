"""The decision: eligibility, cost, pick, the prefill and decode pair, and why."""
