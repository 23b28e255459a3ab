"""Requests to a Kubernetes API server as tests make them: JSON in, JSON out, no client library in between."""

import http.client
import json
import ssl
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from cluster import kubeconfig

Json = dict[str, Any]
PatchType = Literal["merge", "strategic-merge", "apply", "json"]
_PATCH_TYPES = {
    "merge": "application/merge-patch+json",
    "strategic-merge": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
    "json": "application/json-patch+json",
}


class ApiError(Exception):
    """What the server answered instead; `message` is its sentence, `reason` its word (``NotFound``, ``Invalid``)."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            answered = json.loads(body)
        except ValueError:
            answered = {}
        self.status = status
        self.reason = str(answered.get("reason", ""))
        self.message = str(answered.get("message", body.decode(errors="replace")))
        super().__init__(f"{status} {self.reason}: {self.message}")


@dataclass(slots=True)
class Api:
    host: str
    port: int
    context: ssl.SSLContext
    token: str = ""

    @classmethod
    def of(cls, file: Path) -> Self:
        """The client that a kubeconfig describes (its current context; certificates or a token within the file)."""
        told = yaml.safe_load(file.read_text())
        context = _named(told["contexts"], told["current-context"])["context"]
        cluster = _named(told["clusters"], context["cluster"])["cluster"]
        user = _named(told["users"], context["user"])["user"]
        address = urllib.parse.urlsplit(cluster["server"])
        tls = ssl.create_default_context(cadata=_data(cluster, "certificate-authority").decode())
        if "client-certificate-data" in user or "client-certificate" in user:
            with tempfile.NamedTemporaryFile() as pair:
                pair.write(_data(user, "client-certificate") + _data(user, "client-key"))
                pair.flush()
                tls.load_cert_chain(pair.name)
        return cls(address.hostname or "", address.port or 443, tls, user.get("token", ""))

    def get(self, path: str, **query: str) -> Json:
        return self.request("GET", path, query=query)

    def post(self, path: str, body: Json, **query: str) -> Json:
        return self.request("POST", path, body, query=query)

    def put(self, path: str, body: Json, **query: str) -> Json:
        return self.request("PUT", path, body, query=query)

    def patch(self, path: str, body: Json | list[Json], kind: PatchType = "merge", **query: str) -> Json:
        return self.request("PATCH", path, body, query=query, content=_PATCH_TYPES[kind])

    def delete(self, path: str, body: Json | None = None, **query: str) -> Json:
        return self.request("DELETE", path, body, query=query)

    def is_ready(self) -> bool:
        try:
            return self.text("/readyz") == "ok"
        except (OSError, ApiError, http.client.HTTPException):
            return False

    def text(self, path: str, **query: str) -> str:
        """What is not JSON: logs of a container, health, metrics."""
        return self._send("GET", path, None, query, "").decode(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None = None,
        *,
        query: dict[str, str] | None = None,
        content: str = "application/json",
    ) -> Json:
        """*Errors*: `ApiError` for every answer of 400 and above."""
        sent = None if body is None else json.dumps(body).encode()
        answered: Json = json.loads(self._send(method, path, sent, query or {}, content) or b"{}")
        return answered

    def _send(self, method: str, path: str, body: bytes | None, query: dict[str, str], content: str) -> bytes:
        connection = http.client.HTTPSConnection(self.host, self.port, context=self.context, timeout=60)
        try:
            headers = {"Content-Type": content} if body is not None else {}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            received = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            raise ApiError(response.status, received)
        return received


def _named(entries: list[Json], name: str) -> Json:
    return next(entry for entry in entries if entry["name"] == name)


def _data(section: Json, name: str) -> bytes:
    if f"{name}-data" in section:
        return kubeconfig.embedded(section[f"{name}-data"])
    return Path(section[name]).read_bytes()
