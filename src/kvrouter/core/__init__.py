"""The words that every room shares: ids, hashes, events, workers, constraints, errors."""
