"""Types that every package shares: ids, hashes, events, workers, constraints, errors."""
