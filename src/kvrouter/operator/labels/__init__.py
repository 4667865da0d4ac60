"""Node labels on pods: copied in the write that binds a pod."""
