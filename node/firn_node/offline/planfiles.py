"""Files of forced compactions by Spark: plans, and statements about offsets. A damaged one is made again by its driver."""

from dataclasses import asdict

from firn.errors import FirnError
from firn.statement import BLOCK_OFFSETS, parse
from firn_node.disk import Disk, read_file
from firn_node.offline.report import FileReport, damage_of
from firn_node.plans.plan import unpack


def inspect_plan(disk: Disk, path: str) -> FileReport:
    report = FileReport(path, "plan")
    try:
        plan = unpack(read_file(disk, path), file=path)
    except FirnError as error:
        report.damages.append(damage_of(error, file=path, position=0))
        return report
    report.facts.update(id=plan.id, run=plan.run, topic_id=plan.topic_id, state=plan.state)
    report.facts["partitions"] = [
        {
            "partition": part.number, "state": part.result.state, "plan_end": part.plan_end, "records": part.records,
            "slices": part.slices, "seen": part.seen, "dead": part.dead, "compared": part.compared,
            "disagreements": part.disagreements,
        }
        for part in plan.partitions.values()
    ]  # fmt: skip
    return report


def inspect_statement(disk: Disk, path: str) -> FileReport:
    report = FileReport(path, "statement")
    file = disk.open(path)
    try:
        statement = parse(file.pread, file.size())
        report.facts.update(asdict(statement.subject), seen=statement.seen, dead=statement.dead)
        numbers = [block.number for block in statement.blocks()]
        report.facts.update(blocks=len(numbers))
        if numbers:
            report.facts.update(start=numbers[0] * BLOCK_OFFSETS, end=(numbers[-1] + 1) * BLOCK_OFFSETS)
    except FirnError as error:
        report.damages.append(damage_of(error, file=path))
    finally:
        file.close()
    return report
