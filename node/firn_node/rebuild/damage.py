"""A replica's folder that cannot be opened, because what is stored in it is damaged: may it start anew?"""

from firn.errors import Corrupt, FirnError
from firn_node.clock import Randomness
from firn_node.coordinator import Coordinator
from firn_node.coordinator.api import Found
from firn_node.disk import Disk
from firn_node.engine.identity import load_identity
from firn_node.rebuild.folder import Order, order
from firn_node.replication.record import GroupId, LogId


async def start_anew_after(
    error: Corrupt, disk: Disk, data: str, randomness: Randomness, coordinator: Coordinator, group_id: GroupId
) -> bool:
    """Order it, if the folder is a member's and another replica is in sync, which has everything.

    A folder that the group does not know may be a single broker's, given here by mistake: it is left alone.
    """
    try:
        if not disk.exists(f"{data}/identity"):
            return False
        own = LogId(load_identity(disk, data, randomness).log_id)
    except FirnError:
        return False
    reading = await coordinator.read(group_id)
    if not isinstance(reading, Found) or own not in reading.record.members:
        return False
    if not reading.record.in_sync - {own}:
        return False
    order(disk, data, Order(f"it is damaged: {error.message}", own))
    return True
