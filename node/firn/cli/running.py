"""What every command shares: where the broker is, how a failure ends, how an asynchronous command runs.

Exit codes: 0 done; 1 failed, with one sentence on stderr (what, why, what to do); 2 wrong usage.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from firn.errors import FirnError, Invalid
from firn.units import duration_ms

if TYPE_CHECKING:
    from firn.client import Client

DEFAULT_BROKER = "127.0.0.1:7700"
DEFAULT_TIMEOUT = "30s"

T = TypeVar("T")


class Failure(Exception):
    """A command failed; the text is the sentence for stderr. Exit code 1."""


def checked(parse: Callable[[str], T]) -> Callable[[str | None], T | None]:
    """``parse`` as an option's parser: its ``Invalid`` becomes wrong usage (exit code 2)."""

    def parsed(text: str | None) -> T | None:
        if text is None or not isinstance(text, str):
            return text
        try:
            return parse(text)
        except Invalid as error:
            raise typer.BadParameter(error.message) from error

    parsed.__name__ = getattr(parse, "__name__", "value")
    return parsed


def _one_address(text: str) -> None:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Invalid(f"{text.strip()!r} is not an address; write HOST:PORT[,HOST:PORT...]")


def _addresses(text: str) -> str:
    for address in text.split(","):
        _one_address(address)
    return text


def _check_broker(text: str | None) -> str | None:
    return checked(_addresses)(text)


def _check_timeout(text: str | None) -> str | None:
    if text is not None:
        checked(duration_ms)(text)
    return text


def _check_read_from(text: str | None) -> str | None:
    if text not in (None, "master", "any"):
        raise typer.BadParameter(f"{text!r} is unknown; expected master or any")
    return text


def _known_output(text: str | None) -> str | None:
    if text not in (None, "json", "yaml", "table"):
        raise typer.BadParameter(f"{text!r} is unknown; expected json, yaml or table")
    return text


BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        callback=_check_broker,
        metavar="HOST:PORT[,...]",
        help=f"Where the brokers are; else $FIRN_BROKER, else {DEFAULT_BROKER}.",
        show_default=False,
    ),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        callback=_check_timeout,
        metavar="DURATION",
        help=f"Bounds each request; {DEFAULT_TIMEOUT} when not given.",
        show_default=False,
    ),
]
TlsCaOption = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE|system",
        help="Speak TLS with brokers whose certificate this CA signed; else $FIRN_TLS_CA.",
        show_default=False,
    ),
]
TlsCertOption = Annotated[
    str | None,
    typer.Option(
        "--tls-cert", metavar="FILE", help="Your own certificate; else $FIRN_TLS_CERT.", show_default=False
    ),
]
TlsKeyOption = Annotated[
    str | None,
    typer.Option("--tls-key", metavar="FILE", help="Its key; else $FIRN_TLS_KEY.", show_default=False),
]
TokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Holds a bearer token; else $FIRN_TOKEN, $FIRN_TOKEN_FILE.",
        show_default=False,
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="CONTEXT", help="Ask brokers in Kubernetes, by this context of the kubeconfig.",
        show_default=False,
    ),
]  # fmt: skip
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "-n", "--namespace", metavar="NAME", help="Their namespace; else the context's.", show_default=False
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="The BrokerCluster, where there are several.", show_default=False
    ),
]
ServiceAccountOption = Annotated[
    str | None,
    typer.Option(
        "--service-account", metavar="NAME", show_default=False,
        help="Be this ServiceAccount, by a token made now; else an administrator, by the Secret CLUSTER-admin.",
    ),
]  # fmt: skip
ReadFromOption = Annotated[
    str | None,
    typer.Option(
        "--read-from",
        callback=_check_read_from,
        metavar="master|any",
        help="Who answers: the master, or any replica, which may be a moment behind.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        callback=_known_output,
        metavar="json|yaml",
        help="Only this on stdout.",
        show_default=False,
    ),
]


def connect(broker: str | None, timeout: str | None, *, read_from: str | None = None) -> "Client":
    """A client for the given options, or those given before the command's name, or the defaults.

    Errors: typer.BadParameter when ``$FIRN_BROKER`` is no address; Failure when a cluster in Kubernetes is meant and
    there is none, or no way to it.
    """
    given = _common_options()
    if broker is None and (place := kubernetes_place()) is not None:
        from firn.cli.kube.access import cluster_client

        seconds = duration_ms(timeout or given.get("timeout") or DEFAULT_TIMEOUT) / 1000
        return cluster_client(place, timeout=seconds, read_from=read_from or "master")
    from firn.client import Client  # brings aiohttp, which `firn --help` need not wait for

    address = broker or given.get("broker") or os.environ.get("FIRN_BROKER") or DEFAULT_BROKER
    try:
        _addresses(address)
    except Invalid as error:
        raise typer.BadParameter(f"$FIRN_BROKER: {error.message}") from error
    seconds = duration_ms(timeout or given.get("timeout") or DEFAULT_TIMEOUT) / 1000
    return Client(
        address,
        timeout=seconds,
        tls_ca=given.get("tls_ca"),
        tls_cert=given.get("tls_cert"),
        tls_key=given.get("tls_key"),
        token_file=given.get("token_file"),
        read_from=read_from or "master",
    )


def child_options(broker: str | None, timeout: str | None) -> list[str]:
    """The same as options of a process of ours that makes a connection of its own (``firn_spark``).

    Errors: Failure when a cluster in Kubernetes is meant: it is reached by what this process forwards.
    """
    given = _common_options()
    if broker is None and kubernetes_place() is not None:
        fail("Spark on this machine cannot reach brokers in Kubernetes: make a ForceCompaction there instead")
    address = broker or given.get("broker") or os.environ.get("FIRN_BROKER") or DEFAULT_BROKER
    timeout_ms = duration_ms(timeout or given.get("timeout") or DEFAULT_TIMEOUT)
    found = ["--bootstrap", address, "--timeout", f"{timeout_ms}ms"]
    for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
        if (value := given.get(name)) is not None:
            found += ["--" + name.replace("_", "-"), value]
    return found


_common: dict[str, str | None] = {}


def _common_options() -> dict[str, str | None]:
    return _common


@dataclass(frozen=True, slots=True)
class KubernetesPlace:
    """Where in Kubernetes a cluster of brokers is, and who asks. None: as the kubeconfig has it, or the only one."""

    context: str | None = None
    namespace: str | None = None
    cluster: str | None = None
    service_account: str | None = None


def is_plugin() -> bool:
    """Whether this is ``kubectl firn``."""
    return os.path.basename(sys.argv[0]).startswith(("kubectl-firn", "kubectl_firn"))


def kubernetes_place() -> KubernetesPlace | None:
    """The place when a cluster in Kubernetes is meant: by its options, or as kubectl's plugin without --broker."""
    given = _common_options()
    place = KubernetesPlace(*(given.get(name) for name in KubernetesPlace.__slots__))
    if place != KubernetesPlace():
        if given.get("broker"):
            raise typer.BadParameter(
                "--broker is for brokers at an address: give it, or --context, --namespace and --cluster"
            )
        return place
    return place if is_plugin() and not given.get("broker") else None


def needed_place() -> KubernetesPlace:
    """The place, for a command that makes sense in Kubernetes alone: the kubeconfig's own when none is given."""
    return kubernetes_place() or KubernetesPlace()


def set_common(**given: str | None) -> None:
    """Remember what was given before the command's name."""
    _common.update(given)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. SIGTERM and SIGINT cancel it, so that it can finish what it has begun.

    Errors: KeyboardInterrupt when it was stopped by a signal and did not end by itself.
    """

    async def supervised() -> T:
        task = asyncio.ensure_future(work)
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def fail(sentence: str) -> NoReturn:
    """End with exit code 1 and one sentence on stderr."""
    raise Failure(sentence)


def sentence_of(error: BaseException) -> str:
    """The one sentence for an error: one line, whatever its text."""
    if isinstance(error, FirnError):
        text = error.message
    elif isinstance(error, OSError):
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def quiet_stdout() -> None:
    """Let nothing more fail at a closed stdout: the interpreter flushes it once more at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
