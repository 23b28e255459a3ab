"""Topic documents of ``firn up -f``: read from files and folders, applied to the broker at its start."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from firn.errors import Invalid, UnknownTopic
from firn.topicspec import TopicDocument, TopicSpec, parse_documents
from firn_node.engine.api import TopicInfo

FOLLOW_S = 30.0  # the other groups of a cluster that starts elect their masters meanwhile
SUFFIXES = (".yaml", ".yml", ".json")


class Topics(Protocol):
    """The part of the broker that this needs."""

    def topic(self, name: str) -> TopicInfo: ...

    @property
    def default_min_in_sync(self) -> int: ...

    async def create_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None) -> TopicInfo: ...

    async def update_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None) -> TopicInfo: ...

    async def followed(self, wait_s: float) -> list[int]: ...


def read_topic_files(paths: Iterable[str]) -> list[TopicDocument]:
    """The topics of files, and of the YAML files of folders in order of their names.

    Errors: Invalid, naming the file; OSError; Invalid when a topic is given twice.
    """
    found: list[TopicDocument] = []
    seen: dict[str, str] = {}
    for path in (file for given in paths for file in _files(Path(given))):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Invalid(f"{path}: not UTF-8 text: {error}") from error
        for document in parse_documents(text, source=str(path)):
            if document.name in seen:
                raise Invalid(
                    f"{path}: topic {document.name} is given in {seen[document.name]} already; keep one"
                )
            seen[document.name] = str(path)
            found.append(document)
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise Invalid(f"{path}: holds no topic file; expected names that end in {', '.join(SUFFIXES)}")
    return found


async def apply_topics(broker: Topics, documents: Iterable[TopicDocument]) -> list[str]:
    """Create what is missing and update what differs; one sentence for each change.

    A document that leaves ``minInSync`` out takes the default of the group when it makes a topic, and leaves that of
    a topic that there is. Effects: may be repeated. Errors: Invalid when a topic's number of partitions differs.
    """
    told = await _apply(broker, documents)
    if told and (lacking := await broker.followed(FOLLOW_S)):
        named = ", ".join(map(str, lacking))
        told.append(f"broker group {named} could not take that over yet: it follows once it has a master")
    return told


async def _apply(broker: Topics, documents: Iterable[TopicDocument]) -> list[str]:
    told: list[str] = []
    for document in documents:
        try:
            known = broker.topic(document.name)
        except UnknownTopic:
            spec = document.spec_with(broker.default_min_in_sync)
            await broker.create_topic(document.name, spec, wait_s=None)
            told.append(f"topic {document.name} created with {document.spec.partitions} partition(s)")
            continue
        spec = document.spec_with(known.spec.durability.min_in_sync)
        if known.spec == spec:
            continue
        if known.spec.partitions != document.spec.partitions:
            raise Invalid(
                f"topic {document.name} has {known.spec.partitions} partition(s) and its file says "
                f"{document.spec.partitions}: the number cannot change; correct the file, or create another topic"
            )
        await broker.update_topic(document.name, spec, wait_s=None)
        told.append(f"topic {document.name} updated")
    return told
