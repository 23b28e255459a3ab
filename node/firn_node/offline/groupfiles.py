"""Files that tell of a folder's broker group: what it promised, and the epochs of its log."""

from dataclasses import asdict

from firn.errors import FirnError
from firn_node.disk import Disk, read_file
from firn_node.offline.report import FileReport, damage_of
from firn_node.replication.doors import epochfile, groupfile


def inspect_group_file(disk: Disk, path: str) -> FileReport:
    report = FileReport(path, "group file")
    try:
        found = groupfile.parse(read_file(disk, path), path)
    except FirnError as error:
        report.damages.append(damage_of(error, file=path, position=0))
        return report
    facts = asdict(found.meta)
    report.facts.update(group_id=found.group_id, record_version=facts.pop("version"), **facts)
    report.facts["was_shut_down"] = found.was_shut_down
    return report


def inspect_epoch_file(disk: Disk, path: str) -> FileReport:
    """A damaged one is no loss: it is worth a note."""
    report = FileReport(path, "epoch history")
    found = epochfile.parse(read_file(disk, path))
    if found is None:
        report.notes.append("it cannot be read: a start reads the epochs off all batch headers instead")
        return report
    history, upto = found
    report.facts.update(upto=upto, epochs={str(entry.epoch): entry.start for entry in history})
    return report
