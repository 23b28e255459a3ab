"""``kubectl`` as a child: questions that it answers as JSON, and children that run on beside the command.

Every run has its bound in time. What kubectl says on stderr becomes the sentence of the failure.
"""

import asyncio
import ctypes
import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firn.cli.running import Failure

SECONDS_MAX = 60
_PR_SET_PDEATHSIG = 1
_NO_KUBECTL = "kubectl is not installed, or not in $PATH; firn asks a Kubernetes cluster through it"


class Refused(Failure):
    """The API server said no, or there is no such thing."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Which cluster and namespace; None: those of the user's kubeconfig."""

    context: str | None = None
    namespace: str | None = None

    def command(self, *arguments: str) -> list[str]:
        where = ["--context", self.context] if self.context else []
        where += ["--namespace", self.namespace] if self.namespace else []
        return ["kubectl", *where, *arguments]

    def run(self, *arguments: str, stdin: str | None = None, seconds: float = SECONDS_MAX) -> str:
        """What it prints. *Errors*: Refused with what it says; Failure when it is not there or does not end."""
        what = f"kubectl {arguments[0]}"
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except FileNotFoundError:
            raise Failure(_NO_KUBECTL) from None
        except subprocess.TimeoutExpired:
            raise Failure(f"{what}: no answer within {seconds:g} s; does the API server answer?") from None
        if done.returncode:
            raise Refused(f"{what}: {_said(done.stderr) or f'exit code {done.returncode}'}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """One object, or a List."""
        found = json.loads(self.run("get", *arguments, "--output", "json"))
        if not isinstance(found, dict):
            raise Failure(
                f"kubectl get {' '.join(arguments)}: answered with {str(found)[:100]} where an object belongs"
            )
        return found

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """The objects of a List."""
        return list(self.get(*arguments).get("items", ()))

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """A child with its output in pipes. It gets no signal of the terminal, and ends when this process does."""
        try:
            return await asyncio.create_subprocess_exec(
                *self.command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        except FileNotFoundError:
            raise Failure(_NO_KUBECTL) from None


def _end_with_parent() -> None:
    """SIGTERM to this child when its parent is gone, however it went. Linux alone has it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _said(stderr: str) -> str:
    """The line that says why, without warnings before it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if line.lower().startswith(("error", "unable"))] or lines
    return told[-1] if told else ""


def names(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["metadata"]["name"] for item in items]
