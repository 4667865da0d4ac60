"""What the cost of time chooses, against the blocks rule and the best of the published rules, in replays."""
