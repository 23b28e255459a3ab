"""``firn topics``: create, list, describe, delete."""

import sys
from typing import Annotated, Any

import typer
import yaml

from firn.cli.printing import print_document
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, connect, fail, run
from firn.cli.tables import print_topic, print_topics
from firn.errors import Invalid
from firn.topicspec import check_topic_name, parse_spec, set_field

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Any field of the spec, such as compaction.minDirtyRatio=0.2."
    ),
]


def register(app: typer.Typer) -> None:
    topics = typer.Typer(
        help="Create, list, describe and delete topics.", no_args_is_help=True, rich_markup_mode=None
    )
    topics.command("create", help="Create a topic.")(create)
    topics.command("list", help="List the topics.")(list_topics)
    topics.command("describe", help="One topic: its partitions and settings.")(describe)
    topics.command("delete", help="Delete a topic and all of its records.")(delete)
    app.add_typer(topics, name="topics")


def spec_document(partitions: int | None, settings: list[str]) -> dict[str, Any]:
    """The spec document of ``--partitions`` and ``--set``. Values are YAML scalars: ``0.2``, ``24h``, ``sync``.

    Errors: Invalid, naming the option or the field.
    """
    document: dict[str, Any] = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals or not field:
            raise Invalid(f"--set {setting}: expected FIELD=VALUE")
        try:
            set_field(document, field.removeprefix("spec."), yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise Invalid(f"--set {setting}: {value!r} is not a YAML value") from error
    if partitions is not None:
        document["partitions"] = partitions
    parse_spec(document)
    return document


def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    partitions: Annotated[
        int | None, typer.Option("--partitions", metavar="N", help="1 when not given.", show_default=False)
    ] = None,
    settings: SetOption = None,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    try:
        document = spec_document(partitions, settings or [])
        check_topic_name(name)
    except Invalid as error:
        raise typer.BadParameter(error.message) from error

    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            return await client.create_topic(name, **document)

    spec = run(work())["spec"]
    if not print_document({"name": name, "spec": spec}, output):
        print(f"created {name} with {spec['partitions']} partition{'s' if spec['partitions'] != 1 else ''}")


def list_topics(
    broker: BrokerOption = None, timeout: TimeoutOption = None, output: OutputOption = None
) -> None:
    async def work() -> list[dict[str, Any]]:
        async with connect(broker, timeout) as client:
            return [dict(topic) for topic in await client.topics()]

    found = run(work())
    if not print_document(found, output):
        print_topics(found)


def describe(
    name: str, broker: BrokerOption = None, timeout: TimeoutOption = None, output: OutputOption = None
) -> None:
    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            return dict(await client.describe(name))

    found = run(work())
    if not print_document(found, output):
        print_topic(found)


def delete(
    name: str,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
) -> None:
    if not yes:
        if not sys.stdin.isatty():
            fail(
                f"{name} is not deleted: there is nobody to ask; give --yes to delete it and all of its records"
            )
        if not typer.confirm(f"Delete topic {name} and all of its records?", err=True):
            fail(f"{name} is not deleted: you said no")

    async def work() -> None:
        async with connect(broker, timeout) as client:
            await client.delete_topic(name)

    run(work())
    print(f"deleted {name}")
