"""Files that tell a client of Kubernetes where the API is and who it is."""

import base64
from pathlib import Path
from typing import Any

import yaml


def write(
    file: Path, *, server: str, authority: Path, user: dict[str, Any], namespace: str = "default"
) -> Path:
    """A kubeconfig of one context. Everything is in the file itself, so that it can be copied and handed out."""
    cluster = {"server": server, "certificate-authority-data": _inline(authority)}
    context = {"cluster": "firn-test", "user": "user", "namespace": namespace}
    text = yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "firn-test", "cluster": cluster}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "firn-test", "context": context}],
            "current-context": "firn-test",
        }
    )
    file.touch(mode=0o600)
    file.write_text(text)
    return file


def by_certificate(certificate: Path, key: Path) -> dict[str, str]:
    return {"client-certificate-data": _inline(certificate), "client-key-data": _inline(key)}


def by_token(token: str) -> dict[str, str]:
    return {"token": token}


def _inline(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def embedded(data: str) -> bytes:
    """What a field whose name ends in ``-data`` holds."""
    return base64.b64decode(data)
