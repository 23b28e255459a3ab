"""The commands that need the broker's packages, registered on the ``firn`` application.

Nothing heavy is imported here: every ``firn`` command loads this module. A flag per setting follows from
``firn_node.config.SETTINGS``.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firn.cli.running import OutputOption, checked
from firn.errors import Invalid
from firn.units import duration_ms

if TYPE_CHECKING:
    from firn_node.cluster import Cluster
    from firn_node.security.localca import LocalFiles
    from firn_node.settings import BrokerSettings, GroupSettings

RESTART_AFTER_MS = 5_000
DRILL_SECONDS = 15.0


def commands(app: typer.Typer) -> None:
    """Add ``up``, ``token``, ``verify``, ``dump``, ``index`` and ``drill``. The entry point ``firn.commands``."""
    app.command("up", help="Run a broker in the foreground until SIGINT or SIGTERM.")(_with_setting_flags(up))
    app.command("token", help="Make a bearer token, and its entry for the file of --tokens.")(token)
    app.command("verify", help="Audit a stopped broker's data folder; damaged files are named.")(verify)
    app.command("dump", help="Print any file of a data folder.")(dump)
    index = typer.Typer(help="The partition index.", no_args_is_help=True, rich_markup_mode=None)
    index.command("migrate", help="Rebuild the index of a stopped broker as another kind.")(index_migrate)
    index.callback()(_index)
    app.add_typer(index, name="index")
    drill = typer.Typer(help="Failure drills.", no_args_is_help=True, rich_markup_mode=None)
    drill.command("list", help="The drills that there are, and what each passes with.")(drill_list)
    drill.command("run", help="Run one drill, or all, on a cluster of its own.")(drill_run)
    drill.command("all", help="Run all drills, one after another.")(drill_all)
    app.add_typer(drill, name="drill")


def _index() -> None:
    """Keeps ``migrate`` a subcommand although it is the only one."""


def _with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with one more option per setting, handed over as ``flags``: name -> text."""
    from firn_node.config import SETTINGS, default_text

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
    options = []
    for setting in SETTINGS:
        default = default_text(setting)
        info = typer.Option(
            setting.flag,
            help=f"{setting.help}{f' Default: {default}.' if default else ''}",
            show_default=False,
            metavar=setting.name.upper() if setting.name in ("data", "listen", "node", "index") else "VALUE",
        )
        options.append(
            inspect.Parameter(
                setting.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, info],
            )
        )

    def wrapped(**given: Any) -> None:
        flags = {setting.name: given.pop(setting.parameter) for setting in SETTINGS}
        command(**given, flags=flags)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def up(
    topic_files: Annotated[
        list[str] | None, typer.Option("-f", "--file", metavar="FILE|DIR", help="Topics to create or update.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="Settings as YAML.")] = None,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", metavar="N", help="A broker group of N processes, ports from --listen up."
        ),
    ] = 1,
    groups: Annotated[
        int,
        typer.Option(
            "--groups",
            metavar="N",
            envvar="FIRN_GROUPS",
            show_envvar=False,
            help="So many broker groups; with --coordinator: as many has the cluster. Else $FIRN_GROUPS.",
        ),
    ] = 1,
    restart_after: Annotated[
        int | None,
        typer.Option(
            "--restart-after",
            parser=checked(duration_ms),
            metavar="DURATION",
            show_default=False,
            help="With --replicas: one that ends is started again after this; 0s: never. Default: 5s.",
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")] = False,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls", help="TLS and certificates by a CA of its own, kept in the data folder under tls."
        ),
    ] = False,
    print_ready: Annotated[
        bool, typer.Option("--print-ready", help="Only READY HOST:PORT on stdout.")
    ] = False,
    flags: dict[str, Any] | None = None,
) -> None:
    """Run one broker, or a group of replicas as processes. Flags win over the file, the file over variables."""
    from firn_node.config import BY_NAME, check_listen, configure, parse_config, unknown_variables

    flags = flags or {}
    if replicas < 1 or groups < 1:
        raise typer.BadParameter("--replicas and --groups: expected a whole number of 1 or more")
    try:
        configure({"data": "-", **{k: v for k, v in flags.items() if v is not None}}, environment={})
    except Invalid as error:
        raise typer.BadParameter(error.message) from error
    file_name = config or os.environ.get("FIRN_CONFIG") or ""
    file = parse_config(Path(file_name).read_text(encoding="utf-8"), source=file_name) if file_name else None
    if not flags.get("data") and not (file or {}).get("data") and not os.environ.get("FIRN_DATA"):
        raise typer.BadParameter("no data folder: give --data DIR, `data` in the --config file or $FIRN_DATA")
    found = configure(flags, file=file, file_name=file_name, environment=os.environ)
    settings = found.settings
    if settings.group is not None and settings.group.is_in_kubernetes:
        from firn_node.kubernetes.pod import placed

        settings = placed(found, os.environ)
    if settings.group is not None:
        settings = replace(settings, group=_placed(settings.group, replicas, groups))
    cluster = _planned(settings, replicas, groups)
    nodes = [settings.node] if cluster is None else [replica.node for replica in cluster.replicas]
    local_ca = _local_ca(settings, nodes) if tls else None
    settings = settings if local_ca is None else _secured(settings, local_ca, nodes[0])
    is_closed = settings.security.has_tls and settings.security.has_authentication
    settings = replace(settings, insecure=insecure and not is_closed)
    check_listen(settings)

    from firn_node.config_topics import read_topic_files
    from firn_node.main import Announcer, start

    topics = read_topic_files(topic_files or [])
    announcer = Announcer(ready_only=print_ready)
    if tls:
        announcer.say(_how_to_connect(settings))
    for name in unknown_variables(os.environ):
        announcer.warn(f"${name} is no setting of firn and is ignored; `firn up --help` lists the settings")
    if cluster is None:
        start(settings, topics, announcer)
        return
    from firn_node.cluster import start_cluster

    given = [
        text for name, value in flags.items() if value is not None for text in (BY_NAME[name].flag, value)
    ]
    given += ["--config", config] if config else []
    given += [text for path in topic_files or () for text in ("--file", path)]
    given += ["--insecure"] if insecure else []
    seconds = (RESTART_AFTER_MS if restart_after is None else restart_after) / 1000
    start_cluster(cluster, given, announcer, restart_after_s=seconds, local_ca=local_ca)


def _placed(place: "GroupSettings", replicas: int, groups: int) -> "GroupSettings":
    """The place of one replica in a cluster of so many groups."""
    if replicas > 1:
        raise typer.BadParameter(
            "--replicas runs a whole group, --coordinator makes one replica: give one of them"
        )
    if place.group >= groups:
        raise typer.BadParameter(
            f"--group {place.group}: of {groups} groups the last is {groups - 1}; give --groups"
        )
    return replace(place, groups=groups)


def _planned(settings: "BrokerSettings", replicas: int, groups: int) -> "Cluster | None":
    """The processes of ``--replicas`` and ``--groups``; None for a broker of its own, and for one replica."""
    if settings.group is not None or replicas * groups == 1:
        return None
    from firn_node.cluster import plan_cluster

    return plan_cluster(
        settings.data, host=settings.host, port=settings.port, replicas=replicas, groups=groups
    )


def _local_ca(settings: "BrokerSettings", nodes: list[str]) -> "LocalFiles":
    """Certificates that are made, or renewed, now."""
    from firn_node.clock import RealClock
    from firn_node.disk import RealDisk
    from firn_node.security.localca import ensure

    if settings.security.has_tls or settings.security.tls_ca:
        raise typer.BadParameter(
            "--tls makes its own certificates: leave out --tls-cert, --tls-key and --tls-ca"
        )
    return ensure(RealDisk(settings.data), f"{settings.data}/tls", nodes, RealClock())


def _secured(settings: "BrokerSettings", files: "LocalFiles", node: str) -> "BrokerSettings":
    from firn_node.security.localca import secured

    return replace(settings, security=secured(settings.security, files, node))


def _how_to_connect(settings: "BrokerSettings") -> str:
    folder = f"{settings.data}/tls"
    return (
        f"connect with: export FIRN_TLS_CA={folder}/ca.crt FIRN_TLS_CERT={folder}/admin.crt "
        f"FIRN_TLS_KEY={folder}/admin.key"
    )


def token(
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Who it will speak for.")],
    admin: Annotated[bool, typer.Option("--admin", help="With the role admin.")] = False,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="TIME", help="As 2027-01-01T00:00:00Z; never when left out."),
    ] = None,
) -> None:
    """The token goes to stdout and is kept nowhere; its entry for the token file to stderr."""
    from firn_node.clock import RealRandomness
    from firn_node.security.tokens import entry_of, new_token, parse_tokens

    made = new_token(RealRandomness())
    entry = entry_of(made, principal, is_admin=admin, expires=expires)
    try:
        parse_tokens(f"tokens:\n{entry}", source="firn token")
    except Invalid as error:
        raise typer.BadParameter(error.message) from error
    typer.echo(f"add this to the file of --tokens:\n{entry}", err=True)
    print(made)


def verify(
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="The data folder of a stopped broker.")],
    output: OutputOption = None,
) -> None:
    from firn_node.verify import verify_command

    verify_command(data, output=output)


def dump(
    files: Annotated[list[str], typer.Argument(metavar="FILE...")],
    records: Annotated[bool, typer.Option("--records", help="Also every record of every batch.")] = False,
    output: OutputOption = None,
) -> None:
    from firn_node.dump import dump_command

    dump_command(files, output=output, with_records=records)


def index_migrate(
    data: Annotated[str, typer.Option("--data", metavar="DIR")],
    to: Annotated[str, typer.Option("--to", metavar="rocksdb|files|mirrored")],
) -> None:
    from firn_node.config import INDEX_KINDS
    from firn_node.offline.migrate import migrate_index

    if to not in INDEX_KINDS:
        raise typer.BadParameter(f"--to: {to!r} is unknown; expected one of {', '.join(INDEX_KINDS)}")
    print(migrate_index(data, to))


def drill_list(output: OutputOption = None) -> None:
    from firn_node.drills.command import list_drills

    list_drills(output)


SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Replays a run's choices; else a new one.", show_default=False),
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=1.0, help="How long `random` goes on with faults.")
]
DrillTtlOption = Annotated[
    int | None,
    typer.Option(
        "--lease-ttl",
        parser=checked(duration_ms),
        metavar="DURATION",
        show_default=False,
        help="leaseTtl of the drill's group. Default: 3s.",
    ),
]

DrillTableOption = Annotated[
    str | None,
    typer.Option("--write-table", metavar="FILE", help="Put the results into the table of this file."),
]

DrillReleaseOption = Annotated[
    str | None,
    typer.Option(
        "--release",
        metavar="DIR",
        help="Where another release lies, as PYTHONPATH would name it; for `upgrade`.",
    ),
]


def drill_run(
    name: Annotated[str, typer.Argument(metavar="NAME|all")],
    seed: SeedOption = None,
    seconds: SecondsOption = DRILL_SECONDS,
    lease_ttl: DrillTtlOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="DIR", help="Work in this new folder and keep it; else a temporary one."
        ),
    ] = None,
    table: DrillTableOption = None,
    output: OutputOption = None,
    release: DrillReleaseOption = None,
) -> None:
    """Exit code 1 when something was lost or doubled, or took too long."""
    from firn_node.drills.command import run_drills

    run_drills(
        name, seed=seed, seconds=seconds, lease_ttl_ms=lease_ttl, data=data, output=output, table=table,
        release=release,
    )  # fmt: skip


def drill_all(
    seed: SeedOption = None,
    seconds: SecondsOption = DRILL_SECONDS,
    lease_ttl: DrillTtlOption = None,
    table: DrillTableOption = None,
    output: OutputOption = None,
    release: DrillReleaseOption = None,
) -> None:
    drill_run("all", seed, seconds, lease_ttl, None, table, output, release)
