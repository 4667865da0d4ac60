"""Copies node labels to pods in the write that binds a pod."""
