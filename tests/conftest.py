"""What every test may ask for. A fixture costs nothing until a test names it.

Of examples that Hypothesis makes, none fails for its time: a machine may stand still for seconds.
"""

from cluster.fixtures import apiserver, bare, nodes, pytest_runtest_call, pytest_runtest_setup
from hypothesis import HealthCheck, settings

__all__ = ["apiserver", "bare", "nodes", "pytest_runtest_call", "pytest_runtest_setup"]

settings.register_profile("firn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("firn")
