"""The controller: watches, writes, and the leader's lease."""
