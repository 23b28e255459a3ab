"""The command line against a cluster of brokers in Kubernetes: ``firn --context CTX``, and ``kubectl firn``.

Everything goes through ``kubectl``, as children of this process: whatever kubeconfig, login and rights the user has there
are the ones that count, and the light package needs no library of Kubernetes.
"""
