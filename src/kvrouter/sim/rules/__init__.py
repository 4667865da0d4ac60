"""The published routing rules of other routers, to compare with in a replay."""
