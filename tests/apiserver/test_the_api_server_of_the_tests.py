"""The harness's own promises about a lone API server."""

import subprocess
from pathlib import Path

import pytest
from cluster.api import Api, ApiError
from cluster.apiserver import ApiServer

pytestmark = pytest.mark.apiserver


def test_a_service_account_may_do_what_its_role_says_and_nothing_else(apiserver: ApiServer) -> None:
    with apiserver.namespace() as space:
        config = apiserver.account(space, "bob")
        bob = Api.of(config)
        rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}"
        rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}
        apiserver.api.post(f"{rights}/roles", {"metadata": {"name": "reader"}, "rules": [rule]})
        subject = {"kind": "ServiceAccount", "name": "bob", "namespace": space}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
        binding = {"metadata": {"name": "reader"}, "roleRef": role, "subjects": [subject]}
        apiserver.api.post(f"{rights}/rolebindings", binding)
        apiserver.until_may(config, "list", "configmaps", space=space)
        mark = apiserver.audit.mark()

        bob.get(f"/api/v1/namespaces/{space}/configmaps")
        with pytest.raises(ApiError, match="secrets is forbidden"):
            bob.get(f"/api/v1/namespaces/{space}/secrets")

        who = f"system:serviceaccount:{space}:bob"
        asked = [request for request in apiserver.audit.since(mark) if request.user == who]
        assert [(request.verb, request.resource, request.code) for request in asked] == [
            ("list", "configmaps", 200),
            ("list", "secrets", 403),
        ]
        assert 'RoleBinding "reader' in asked[0].allowed_by


def test_a_deleted_namespace_goes_away_with_what_is_in_it(apiserver: ApiServer) -> None:
    with apiserver.namespace() as space:
        apiserver.api.post(f"/api/v1/namespaces/{space}/configmaps", {"metadata": {"name": "kept"}})
    path = f"/api/v1/namespaces/{space}"
    apiserver.until(lambda: _is_missing(apiserver.api, path), "the namespace is gone")


def test_kubectl_finds_the_server(apiserver: ApiServer) -> None:
    assert "kube-system" in apiserver.kubectl("get", "namespaces", "-o", "name")


def test_nothing_runs_and_no_file_is_left_when_a_server_has_been_stopped() -> None:
    with ApiServer.start() as server:
        folder = server.folder
        assert _processes_that_name(folder)
    assert not folder.exists()
    assert not _processes_that_name(folder)


def _is_missing(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except ApiError as error:
        return error.reason == "NotFound"
    return False


def _processes_that_name(folder: Path) -> list[str]:
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line]
