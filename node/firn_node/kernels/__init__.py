"""Compiled array-in array-out loops; importing them loads Numba. ``python -m firn_node.kernels.warm`` compiles."""

from firn_node.kernels.hashing import fingerprint, secret_of
from firn_node.kernels.sorting import sort_key_index

__all__ = ["fingerprint", "secret_of", "sort_key_index"]
