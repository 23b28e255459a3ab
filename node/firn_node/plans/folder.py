"""The files of plans.

::

    DIR/plans/<topic_id>/PLAN                               the newest plan of a topic
    DIR/plans/<topic_id>/<plan>-<partition>-<slice>.statement   what was uploaded for it; gone once its partition has ended
    DIR/plans/<topic_id>/<number>.upload                    being uploaded

What does not belong to an open plan is removed when the folder is loaded. Any of it may be lost: the driver plans again.
"""

import itertools
import logging
from collections.abc import Iterable

from firn.errors import Corrupt, Invalid
from firn.statement import Statement, parse
from firn_node.disk import Disk, File, read_file, replace_file
from firn_node.failpoints import step
from firn_node.plans.plan import Plan, PlannedPartition, unpack

_log = logging.getLogger(__name__)
FOLDER = "plans"
PLAN = "PLAN"
_STATEMENT = ".statement"


class PlanFolder:
    """Methods do I/O, in any thread; of one topic one at a time."""

    def __init__(self, disk: Disk, data: str) -> None:
        self.disk = disk
        self._path = f"{data}/{FOLDER}"
        self._uploads = itertools.count()

    def load(self) -> list[Plan]:
        """The plans there are, with what was uploaded for them. *Effects*: what belongs to none is removed."""
        found = []
        for name in self.disk.list(self._path):
            plan = self._load(int(name)) if name.isdigit() else None
            if plan is None:
                self.disk.remove_tree(f"{self._path}/{name}")
            else:
                found.append(plan)
        return found

    def _load(self, topic_id: int) -> Plan | None:
        path = f"{self.folder(topic_id)}/{PLAN}"
        if not self.disk.exists(path):
            return None
        try:
            plan = unpack(read_file(self.disk, path), file=path)
        except Corrupt as error:
            _log.warning("a plan is lost, its driver plans again: %s", error.message)
            return None
        wanted = {
            self._statement_name(plan, part, slice): (part, slice)
            for part in plan.partitions.values()
            for slice in range(part.slices)
            if plan.is_open and not part.has_ended
        }
        for part, _ in wanted.values():
            part.seen = part.dead = 0
        for name in self.disk.list(self.folder(topic_id)):
            if name == PLAN:
                continue
            if name in wanted and self._take(plan, *wanted[name]):
                continue
            self.disk.unlink(f"{self.folder(topic_id)}/{name}")
        return plan

    def _take(self, plan: Plan, part: PlannedPartition, slice: int) -> bool:
        """Whether the statement about a slice is there: it was checked when it was uploaded."""
        file = self.disk.open(self.statement_path(plan, part, slice))
        try:
            statement = parse(file.pread, file.size())
        except Invalid as error:
            _log.warning("a statement is lost, a task makes it again: %s: %s", file.path, error.message)
            return False
        finally:
            file.close()
        note(part, slice, statement)
        return True

    def store(self, plan: Plan) -> None:
        """*Effects*: durable on return; may be repeated."""
        folder = self.folder(plan.topic_id)
        self.disk.make_folder(folder)
        replace_file(self.disk, f"{folder}/{PLAN}", plan.pack())
        step("plan.stored")

    def new_upload(self, plan: Plan) -> File:
        """A file for a statement that is being uploaded; ``keep`` gives it its name."""
        return self.disk.open(f"{self.folder(plan.topic_id)}/{next(self._uploads)}.upload", "create")

    def check(self, file: File, plan: Plan, part: PlannedPartition, slice: int) -> Statement:
        """An uploaded statement, all of it read. *Errors*: Invalid."""
        statement = parse(file.pread, file.size())
        expected = plan.subject(part, slice)
        if statement.subject != expected:
            raise Invalid(f"statement: expected one about {expected}, found one about {statement.subject}")
        for _ in statement.blocks():
            pass
        return statement

    def keep(self, file: File, plan: Plan, part: PlannedPartition, slice: int) -> None:
        """Give an upload its name. *Effects*: durable on return.

        1. its bytes are synced, 2. it is renamed, 3. the folder is synced.
        """
        file.sync()
        step("plan.statement_synced")
        self.disk.rename(file.path, self.statement_path(plan, part, slice))
        step("plan.statement_named")
        self.disk.sync_folder(self.folder(plan.topic_id))

    def is_equal(self, file: File, plan: Plan, part: PlannedPartition, slice: int) -> bool:
        """Whether an upload says what is here already."""
        kept = self.disk.open(self.statement_path(plan, part, slice))
        try:
            size, at = file.size(), 0
            if kept.size() != size:
                return False
            while at < size:
                if file.pread(_COMPARED_BYTES, at) != kept.pread(_COMPARED_BYTES, at):
                    return False
                at += _COMPARED_BYTES
            return True
        finally:
            kept.close()

    def forget_statements(self, plan: Plan, parts: Iterable[PlannedPartition]) -> None:
        """*Effects*: may be repeated."""
        for part in parts:
            for slice in range(part.slices):
                self.disk.unlink(self.statement_path(plan, part, slice))
        step("plan.statements_gone")

    def remove(self, topic_id: int) -> None:
        """A topic's plan with all of its files. *Effects*: may be repeated."""
        self.disk.unlink(f"{self.folder(topic_id)}/{PLAN}")
        step("plan.gone")
        self.disk.remove_tree(self.folder(topic_id))

    def folder(self, topic_id: int) -> str:
        return f"{self._path}/{topic_id}"

    def statement_path(self, plan: Plan, part: PlannedPartition, slice: int) -> str:
        return f"{self.folder(plan.topic_id)}/{self._statement_name(plan, part, slice)}"

    def statement_paths(self, plan: Plan, part: PlannedPartition) -> list[str]:
        return [self.statement_path(plan, part, slice) for slice in range(part.slices)]

    def _statement_name(self, plan: Plan, part: PlannedPartition, slice: int) -> str:
        return f"{plan.id}-{part.number}-{slice}{_STATEMENT}"


_COMPARED_BYTES = 1 << 20


def note(part: PlannedPartition, slice: int, statement: Statement) -> None:
    """Take in that a statement is here."""
    if slice not in part.uploaded:
        part.uploaded.add(slice)
        part.seen += statement.seen
        part.dead += statement.dead
