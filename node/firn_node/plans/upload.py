"""One statement that comes in: written to a file as it arrives, checked as a whole, then kept or refused."""

from typing import TYPE_CHECKING, Any

from firn.errors import AlreadyUploaded, LimitExceeded
from firn.statement import BYTES_MAX, Statement
from firn_node.disk import File
from firn_node.plans.plan import Plan, PlannedPartition

if TYPE_CHECKING:
    from firn_node.plans.plans import Plans


class Upload:
    """Use ``write`` for each run of bytes, then ``finish``; ``close`` in any case."""

    def __init__(self, plans: "Plans", plan: Plan, part: PlannedPartition, slice: int) -> None:
        self._plans = plans
        self._plan = plan
        self._part = part
        self._slice = slice
        self._size = 0
        self._file: File | None = None
        self._is_kept = False

    async def write(self, data: bytes) -> None:
        """*Errors*: LimitExceeded; OSError."""
        if self._size + len(data) > BYTES_MAX:
            raise LimitExceeded(f"statement: more than {BYTES_MAX} bytes")
        await self._plans.in_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._plans.folder.new_upload(self._plan)
        self._file.pwrite([data], self._size)
        self._size += len(data)

    async def finish(self) -> dict[str, Any]:
        """What is missing still. *Effects*: what was uploaded is durable on return; may be repeated.

        *Errors*: Invalid for a damaged statement, or one about something else; AlreadyUploaded; UnknownPlan.
        """
        if self._file is None:
            await self.write(b"")
        statement = await self._plans.in_thread(self._check)
        part = self._part
        await self._plans.kept(self._plan, part, self._slice, statement, self._keep)
        return {"partition": part.number, "slice": self._slice, "missing": part.missing}

    def _check(self) -> Statement:
        assert self._file is not None
        return self._plans.folder.check(self._file, self._plan, self._part, self._slice)

    def _keep(self) -> bool:
        assert self._file is not None
        folder, plan, part, slice = self._plans.folder, self._plan, self._part, self._slice
        if slice not in part.uploaded:
            folder.keep(self._file, plan, part, slice)
            self._is_kept = True
            return True
        if folder.is_equal(self._file, plan, part, slice):
            return False
        raise AlreadyUploaded(
            f"slice {slice} of partition {part.number} was uploaded already, with another content: that one counts",
            partition=part.number, slice=slice,
        )  # fmt: skip

    async def close(self) -> None:
        """Let go of the file. *Effects*: one that was not kept is gone."""
        if self._file is not None:
            await self._plans.in_thread(self._close, self._file)

    def _close(self, file: File) -> None:
        file.close()
        if not self._is_kept:
            self._plans.folder.disk.unlink(file.path)
