"""A ``kubectl`` of the tests' own: a program that answers from a file and forwards to ports of this machine.

The world is a JSON file: ``objects`` (documents with kind and metadata), ``forwards`` (pod -> port of 127.0.0.1),
``refused`` (beginnings of arguments -> what it says on stderr), ``texts`` (beginnings of arguments -> stdout). Every call
is a line of ``calls`` beside it. Annotations change the world, as they would.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "brokerclusters": "BrokerCluster", "brokergroups": "BrokerGroup", "compactedtopics": "CompactedTopic",
    "forcecompactions": "ForceCompaction", "pods": "Pod", "persistentvolumeclaims": "PersistentVolumeClaim",
    "secret": "Secret", "configmap": "ConfigMap", "events": "Event",
}  # fmt: skip


class World:
    """The file, and the folder to put in front of $PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "world.json"
        self._file.write_text(json.dumps({"objects": [], "forwards": {}, "refused": {}, "texts": {}}))
        program = folder / "kubectl"
        here = Path(__file__).parent
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(here)!r})\n"
            f"from kubectl_kit import answer\nsys.exit(answer({str(folder)!r}, sys.argv[1:]))\n"
        )
        program.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._file.read_text())
        return found

    def write(self, **parts: Any) -> None:
        self._file.write_text(json.dumps({**self.read(), **parts}))

    def object(self, kind: str, name: str) -> dict[str, Any]:
        found = [o for o in self.read()["objects"] if (o["kind"], o["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, (kind, name)
        return dict(found[0])

    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def answer(where: str, arguments: list[str]) -> int:
    """One run of the program; its exit code."""
    folder = Path(where)
    with open(folder / "calls", "a") as file:
        file.write(json.dumps(arguments) + "\n")
    world = json.loads((folder / "world.json").read_text())
    rest, options = [], {}
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word in (
            "--context",
            "--namespace",
            "--output",
            "--selector",
            "--audience",
            "--duration",
            "--address",
        ):
            options[word] = arguments[at + 1]
            at += 1
        elif not word.startswith("--"):
            rest.append(word)
        at += 1
    line = " ".join(rest)
    for beginning, text in world["refused"].items():
        if line.startswith(beginning):
            print(text, file=sys.stderr)
            return 1
    for beginning, text in world["texts"].items():
        if line.startswith(beginning):
            print(text, end="")
            return 0
    namespace = options.get("--namespace", "shop")
    return {"get": _get, "annotate": _annotate, "port-forward": _forward}[rest[0]](
        folder, world, rest[1:], namespace
    )


def _get(folder: Path, world: dict[str, Any], rest: list[str], namespace: str) -> int:
    kinds = [KINDS.get(kind.partition(".")[0], kind) for kind in rest[0].split(",")]
    found = [
        o
        for o in world["objects"]
        if o["kind"] in kinds and o["metadata"].get("namespace", "shop") == namespace
    ]
    if len(rest) > 1:
        named = [o for o in found if o["metadata"]["name"] == rest[1]]
        if not named:
            print(f'Error from server (NotFound): {rest[0]}s "{rest[1]}" not found', file=sys.stderr)
            return 1
        print(json.dumps(named[0]))
        return 0
    print(json.dumps({"kind": "List", "items": found}))
    return 0


def _annotate(folder: Path, world: dict[str, Any], rest: list[str], namespace: str) -> int:
    kind, name, change = KINDS[rest[0].partition(".")[0]], rest[1], rest[2]
    for item in world["objects"]:
        if (item["kind"], item["metadata"]["name"]) == (kind, name):
            annotations = item["metadata"].setdefault("annotations", {})
            if change.endswith("-") and "=" not in change:
                annotations.pop(change[:-1], None)
            else:
                key, _, value = change.partition("=")
                annotations[key] = value
    (folder / "world.json").write_text(json.dumps(world))
    return 0


def _forward(folder: Path, world: dict[str, Any], rest: list[str], namespace: str) -> int:
    import asyncio

    pod = rest[0].removeprefix("pod/")
    if pod not in world["forwards"]:
        print(f'Error from server (NotFound): pods "{pod}" not found', file=sys.stderr)
        return 1

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", world["forwards"][pod])
        print(f"Handling connection for {pod}", flush=True)
        await asyncio.gather(pipe(reader, ours), pipe(theirs, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        (folder / f"forward-{pod}.pid").write_text(str(os.getpid()))
        print(f"Forwarding from 127.0.0.1:{port} -> {rest[1].lstrip(':')}", flush=True)
        await server.serve_forever()

    asyncio.run(run())
    return 0
