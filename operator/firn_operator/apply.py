"""``python -m firn_operator.apply [--namespace NAME] FILE...``: server-side apply of resources of ``firn.dev``.

For the chart's first resources: Helm cannot make resources of kinds that the same release brings. What is applied belongs to
the field manager ``firn-chart``, so that people and the operator keep what is theirs.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from firn.errors import FirnError, Invalid, Unavailable
from firn_operator.kube import CLUSTER, COMPACTION, TOPIC, Obj, RealKube, error_of, load_client, name_of

KINDS = {kind.kind: kind for kind in (TOPIC, CLUSTER, COMPACTION)}
MANAGER = "firn-chart"
TRIES, PAUSE_S = 60, 1.0  # the kinds may be served only a moment after they were made


async def apply_all(documents: Sequence[Obj], namespace: str) -> list[str]:
    """What was applied, one line each. Errors: the API server's, when it keeps refusing."""
    kube = RealKube(await load_client())
    try:
        return [await _apply(kube, document, namespace) for document in documents]
    finally:
        await kube.close()


async def _apply(kube: RealKube, document: Obj, namespace: str) -> str:
    kind, name = KINDS[document["kind"]], name_of(document)
    meta = {"namespace": namespace, **document["metadata"]}
    path = kind.path(str(meta["namespace"]), name)
    for attempt in range(TRIES):
        try:
            status, answer = await kube.request(
                "PATCH", path, body={**document, "metadata": meta}, content="application/apply-patch+yaml",
                query={"fieldManager": MANAGER, "force": "true"},
            )  # fmt: skip
            if status < 300:
                return f"{kind.kind} {meta['namespace']}/{json.loads(answer)['metadata']['name']}: applied"
            if status != 404:
                raise error_of(status, answer)
        except Unavailable:
            if attempt == TRIES - 1:
                raise
        await asyncio.sleep(PAUSE_S)
    raise Unavailable(
        f"{kind.kind} {name}: the API server does not serve this kind, or there is no such namespace"
    )


def read(files: Sequence[str]) -> list[Obj]:
    """The documents of the files. Errors: Invalid for a kind that is none of firn's."""
    found: list[Obj] = []
    for file in files:
        for document in yaml.safe_load_all(Path(file).read_text(encoding="utf-8")):
            if document is None:
                continue
            if not isinstance(document, dict) or document.get("kind") not in KINDS:
                raise Invalid(f"{file}: expected documents of the kinds {', '.join(KINDS)}")
            found.append(document)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="firn_operator.apply")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("files", nargs="+")
    given = parser.parse_args(arguments)
    try:
        for line in asyncio.run(apply_all(read(given.files), given.namespace)):
            print(line)
    except FirnError as error:
        print(f"firn_operator.apply: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
