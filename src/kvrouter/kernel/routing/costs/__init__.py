"""Cost rules: the cost of a leg at each rank, one file for each rule."""
