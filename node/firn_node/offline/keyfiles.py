"""Key query files of the commit log, every page checked."""

from firn.errors import Corrupt
from firn_node.disk import Disk
from firn_node.log import keysfile
from firn_node.offline.report import FileReport, damage_of


def inspect_keys_file(disk: Disk, path: str) -> FileReport:
    """A ``.keys`` file: header, every page's CRC, number and order of pairs. It is derived: rebuilt when damaged."""
    report = FileReport(path, "key query index")
    file = disk.open(path)
    try:
        header = keysfile.read_header(file)
        report.facts.update({name: getattr(header, name) for name in header.__slots__ if name != "probe"})
        first = file.pread(keysfile.PAGE_BYTES, 0)
        if first != header.encode():
            report.damaged(80, "the header page is not zero after its fields")
        last = (-1, -1)
        for number in range(1, header.pages + 1):
            hi, positions = keysfile._read_page(file, header, number)
            pairs = list(zip(hi.tolist(), positions.tolist(), strict=True))
            if pairs != sorted(pairs) or pairs[0] <= last:
                report.damaged(number * keysfile.PAGE_BYTES, "pairs are not in order")
            last = pairs[-1]
    except Corrupt as error:
        report.damages.append(damage_of(error, file=path))
    finally:
        file.close()
    return report
