"""The operator: turns the resources of ``firn.dev`` into broker pods, and keeps them as they are wished."""
