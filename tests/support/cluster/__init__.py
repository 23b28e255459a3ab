"""A real Kubernetes on this machine, for tests: the API alone in seconds, or nodes with pods.

Two layers:

* :class:`cluster.apiserver.ApiServer`: etcd and kube-apiserver on loopback; needs Go, not root.
* :class:`cluster.bare.BareCluster`: a whole cluster, its nodes network namespaces of this machine; needs root.

From a shell: ``PYTHONPATH=tests/support python -m cluster --help``. From a test: the fixtures of `cluster.fixtures`.
"""
