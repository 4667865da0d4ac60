"""The sync plane: router replicas tell each other what they book."""
