"""The commands for clusters in Kubernetes alone. Each needs kubectl; what it says and does is in ``docs/cli.md``."""

from typing import Annotated

import typer

ClusterArgument = Annotated[
    str | None,
    typer.Argument(metavar="[CLUSTER]", help="Else --cluster, else the only one of the namespace."),
]


def register(app: typer.Typer) -> None:
    app.command("pause", help="Kubernetes: let the operator change nothing of a cluster.")(pause)
    app.command("resume", help="Kubernetes: end a pause.")(resume)
    app.command("hibernate", help="Kubernetes: end a cluster's pods, keep its volumes.")(hibernate)
    app.command("wake", help="Kubernetes: start a cluster that hibernates.")(wake)
    app.command("restart", help="Kubernetes: restart a cluster's brokers, one at a time.")(restart)
    app.command("report", help="Kubernetes: one archive for a bug report, secrets left out.")(report)


def _switch(name: str | None, annotation: str, is_on: bool, done: str, already: str) -> None:
    from firn.cli.kube.verbs import switch

    found, has_changed = switch(name, annotation, is_on)
    print(f"cluster {found.name}: {done if has_changed else already}")


def pause(cluster: ClusterArgument = None) -> None:
    done = "paused; the operator changes nothing until `firn resume`. Brokers go on, and elect by themselves"
    _switch(cluster, "paused", True, done, "is paused already")


def resume(cluster: ClusterArgument = None) -> None:
    _switch(cluster, "paused", False, "resumed", "is not paused")


def hibernate(
    cluster: ClusterArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    import sys

    from firn.cli.running import fail

    if not yes:
        if not sys.stdin.isatty():
            fail("nothing is stopped: there is nobody to ask; give --yes to end all brokers of the cluster")
        if not typer.confirm("End all brokers of the cluster? Its volumes are kept.", err=True):
            fail("nothing is stopped: you said no")
    done = "hibernates: its pods end, its volumes and records are kept; `firn wake` starts it"
    _switch(cluster, "hibernate", True, done, "hibernates already")


def wake(cluster: ClusterArgument = None) -> None:
    _switch(cluster, "hibernate", False, "wakes; `firn status` shows how far it is", "does not hibernate")


def restart(cluster: ClusterArgument = None) -> None:
    from firn.cli.kube.verbs import restart as ask_for_restart

    found, at = ask_for_restart(cluster)
    print(
        f"cluster {found.name}: restarts one broker at a time (asked for at {at}); `firn status` shows how far it is"
    )


def report(
    cluster: ClusterArgument = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="FILE", help="Else firn-report-CLUSTER-TIME.tar.gz here.", show_default=False
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", metavar="N", min=1, help="The last so many of each log.")
    ] = 5_000,
) -> None:
    from firn.cli.kube.report import write_report

    path, files = write_report(cluster, to, lines)
    print(f"{path}: {files} files, secrets left out; look through it before you send it to anybody")
