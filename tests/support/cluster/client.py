"""What tests do with a cluster, whichever way it came to be: namespaces, accounts, kubectl, waiting."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from cluster import kubeconfig
from cluster.api import Api, ApiError, Json
from cluster.tools import tool

SECONDS_MAX = 120.0  # until something that takes seconds has happened, on a busy machine
_STEP_SECONDS = 0.05
_AUTHORIZATION = "authorization.k8s.io/v1"


class Client:
    """A cluster through its administrator's kubeconfig."""

    def __init__(self, config: Path) -> None:
        self.kubeconfig = config
        self.api = Api.of(config)

    def kubectl(self, *arguments: str, input: str = "", config: Path | None = None) -> str:
        """What kubectl printed.

        *Errors*: `subprocess.CalledProcessError`, with its complaint in the text.
        """
        return self.run([str(tool("kubectl")), *arguments], input=input, config=config)

    def run(self, command: list[str], *, input: str = "", config: Path | None = None) -> str:
        """A program that finds this cluster by ``KUBECONFIG``; what it printed."""
        ended = self.attempt(command, input=input, config=config)
        if ended.returncode:
            raise CommandFailed(ended)
        return ended.stdout

    def attempt(
        self, command: list[str], *, input: str = "", config: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same without judging how it ended."""
        environment = _environment(config or self.kubeconfig)
        return subprocess.run(
            command, input=input, env=environment, capture_output=True, text=True, check=False
        )

    def apply(self, text: str | Path | Json, *, namespace: str = "") -> str:
        """``kubectl apply`` of a manifest, a file or folder of manifests, or an object."""
        to = ["-n", namespace] if namespace else []
        if isinstance(text, Path):
            return self.kubectl("apply", *to, "-f", str(text))
        manifest = text if isinstance(text, str) else yaml.safe_dump(text)
        return self.kubectl("apply", *to, "-f", "-", input=manifest)

    @contextlib.contextmanager
    def namespace(self, prefix: str = "test", *, labels: Mapping[str, str] | None = None) -> Iterator[str]:
        """A namespace of its own for one test, `restricted` pods only, ordered away when the test ends."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        marks = {"pod-security.kubernetes.io/enforce": "restricted", **(labels or {})}
        metadata = {"name": name, "labels": marks}
        self.api.post("/api/v1/namespaces", {"metadata": metadata})
        try:
            yield name
        finally:
            self.api.delete(f"/api/v1/namespaces/{name}")

    def account(self, namespace: str, name: str, *, seconds: int = 36_000) -> Path:
        """A kubeconfig that speaks as this ServiceAccount, which is made if it is not there."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        with contextlib.suppress(ApiError):
            self.api.post(accounts, {"metadata": {"name": name}})
        return kubeconfig.write(
            self.kubeconfig.parent / f"{namespace}.{name}.kubeconfig",
            server=f"https://{self.api.host}:{self.api.port}",
            authority=self.authority(),
            user=kubeconfig.by_token(self.token(namespace, name, seconds=seconds)),
            namespace=namespace,
        )

    def token(
        self, namespace: str, name: str, *, audiences: list[str] | None = None, seconds: int = 36_000
    ) -> str:
        spec: Json = {"expirationSeconds": seconds}
        if audiences is not None:
            spec["audiences"] = audiences
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answered = self.api.post(
            path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        )
        return str(answered["status"]["token"])

    def until_may(self, config: Path, verb: str, resource: str, *, group: str = "", space: str = "") -> None:
        """The API server lets the account of this kubeconfig do it: of a new binding it learns from a watch."""
        asked = {"verb": verb, "group": group, "resource": resource, "namespace": space}
        account, kind = Api.of(config), "SelfSubjectAccessReview"
        body = {"apiVersion": _AUTHORIZATION, "kind": kind, "spec": {"resourceAttributes": asked}}
        self.until(
            lambda: account.post(f"/apis/{_AUTHORIZATION}/{kind.lower()}s", body)["status"]["allowed"],
            f"the account may {verb} {resource}",
        )

    def until_served(self, *definitions: str) -> None:
        """Objects of these kinds of ours are taken, and kubectl finds them.

        ``kubectl wait`` fails at once on a definition that has no conditions yet.
        """
        for name in definitions:
            plural, _, group = name.partition(".")
            self.until(partial(self._serves, f"/apis/{group}/v1alpha1", plural), f"{name} is served")

    def _serves(self, version: str, plural: str) -> bool:
        try:
            self.api.get(f"{version}/{plural}", limit="1")
            return plural in {each["name"] for each in self.api.get(version)["resources"]}
        except ApiError as error:
            if error.status not in (404, 503):
                raise
            return False

    def authority(self) -> Path:
        """The file of the certificate that the API server's is signed by."""
        told = yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]
        file = self.kubeconfig.parent / "authority.crt"
        file.write_bytes(kubeconfig.embedded(told["certificate-authority-data"]))
        return file

    def until(self, holds: Callable[[], Any], what: str, *, seconds: float = SECONDS_MAX) -> Any:
        """The first true answer of `holds`.

        *Errors*: `AssertionError` with `what` and the last answer when the time is over.
        """
        end = time.monotonic() + seconds
        while not (answer := holds()):
            assert time.monotonic() < end, f"not in {seconds:.0f} s: {what} ({answer!r})"
            time.sleep(_STEP_SECONDS)
        return answer


class WholeCluster(Client):
    """One with nodes, whichever way it came to be."""

    def load(self, *archives: Path) -> None:
        """Images, onto every node that does not have them yet."""
        raise NotImplementedError


class CommandFailed(Exception):
    def __init__(self, ended: "subprocess.CompletedProcess[str]") -> None:
        self.code, self.stderr = ended.returncode, ended.stderr
        super().__init__(f"{' '.join(ended.args)}: exit {ended.returncode}\n{ended.stdout}{ended.stderr}")


def _environment(config: Path) -> dict[str, str]:
    helpers = [str(tool("kubectl").parent), os.environ.get("PATH", "/usr/bin:/bin")]
    return {**os.environ, "KUBECONFIG": str(config), "PATH": ":".join(helpers)}
