"""What every firn process must agree on: formats, wire, errors, units, limits, topic documents, client."""

__version__ = "0.1.0"
