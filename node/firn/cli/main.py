"""The entry point: puts the commands together and turns every failure into an exit code and one sentence."""

import os
import sys
from importlib.metadata import entry_points

import typer

from firn import __version__
from firn.cli import bench, compact, consume, lookup, operating, produce, status, topics
from firn.cli.kube import commands as kube
from firn.cli.running import (
    BrokerOption,
    ClusterOption,
    ContextOption,
    Failure,
    NamespaceOption,
    ServiceAccountOption,
    TimeoutOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenFileOption,
    is_plugin,
    quiet_stdout,
    sentence_of,
    set_common,
)
from firn.errors import FirnError, Unavailable

NODE_COMMANDS = ("up", "token", "verify", "dump", "index", "drill")
PLACE_OPTIONS = ("--context", "-n", "--namespace", "--cluster", "--service-account")
_NO_BROKER = "; start a broker with `firn up --data DIR`, or say where it is with --broker or $FIRN_BROKER"
_CLI_HELP = "firn: a key-compacted message log. Exit codes: 0 done, 1 failed, 2 wrong usage."


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"firn {__version__}")
        raise typer.Exit


def _common(
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    cluster: ClusterOption = None,
    service_account: ServiceAccountOption = None,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    set_common(
        broker=broker,
        timeout=timeout,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        token_file=token_file,
        context=context,
        namespace=namespace,
        cluster=cluster,
        service_account=service_account,
    )


def build() -> typer.Typer:
    """The application with every command that is installed, and a stub for each that is not."""
    app = typer.Typer(
        help=_CLI_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for module in (topics, produce, consume, lookup, compact, status, operating, bench, kube):
        module.register(app)
    missing: ImportError | None = None
    found = entry_points(group="firn.commands")
    for entry in found:
        try:
            entry.load()(app)
        except ImportError as error:
            missing = error
    if missing is not None or not len(found):
        _register_stubs(app, missing)
    return app


def _register_stubs(app: typer.Typer, missing: ImportError | None) -> None:
    reason = f" ({sentence_of(missing)})" if missing else ""

    def stub(name: str) -> None:
        def command(ctx: typer.Context) -> None:
            raise Failure(
                f"firn {name} needs the broker's packages{reason}; install them with: pip install 'firn[node]'"
            )

        app.command(
            name,
            help="Not installed: pip install 'firn[node]'.",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(command)

    known = {command.name for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    for name in NODE_COMMANDS:
        if name not in known:
            stub(name)


def hoisted(arguments: list[str]) -> list[str]:
    """The arguments with the options of Kubernetes before the command's name, where people of kubectl put them behind.

    ``firn up`` has settings of its own by such names, so its arguments stay as they are, as does what follows ``--``.
    """
    if "up" in arguments[:1]:
        return arguments
    front, rest = [], list(arguments)
    at = 0
    while at < len(rest) and rest[at] != "--":
        name, equals, _ = rest[at].partition("=")
        if name not in PLACE_OPTIONS or (not equals and at + 1 == len(rest)):
            at += 1
            continue
        width = 1 if equals else 2
        front += rest[at : at + width]
        del rest[at : at + width]
    return front + rest


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    try:
        build()(args=hoisted(sys.argv[1:]), prog_name="kubectl firn" if is_plugin() else "firn")
    except Failure as error:
        _end(str(error))
    except BrokenPipeError:
        quiet_stdout()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("firn", "firn_node"):
            raise
        _end(f"this command needs the package {error.name}; install it with: pip install 'firn[node,arrow]'")
    except (FirnError, OSError) as error:
        hint = _NO_BROKER if isinstance(error, Unavailable) and "cannot connect" in str(error) else ""
        _end(sentence_of(error) + hint)
    except Exception as error:  # the rim of the process: one sentence for people, the story on request
        if os.environ.get("FIRN_DEBUG"):
            raise
        _end(
            f"unexpected {type(error).__name__}: {sentence_of(error)}; run again with FIRN_DEBUG=1 for the whole story"
        )


def _end(sentence: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        quiet_stdout()
    print(f"firn: {sentence}", file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
