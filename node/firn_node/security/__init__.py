"""Who is at the other end, and what they may do. See ``docs/security.md``."""
