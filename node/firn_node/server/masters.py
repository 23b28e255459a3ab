"""Clients that ask while nobody is known to be master wait here for the next one, instead of asking again and again.

A failover ends for a client when it hears of the new master: by its own tries that is up to a back-off later, and thousands
of clients that try are work for the brokers that elect.
"""

from collections.abc import Sequence

from firn.errors import FirnError, NotMaster
from firn_node.engine.api import Outcome
from firn_node.server.context import Context

HELD_S = 1.0


def masterless(found: Sequence[Outcome] | FirnError) -> NotMaster | None:
    """The refusal, where all was refused because another node is master of this group and it is not known which."""
    if isinstance(found, NotMaster):
        is_of_group = "address" in found.details and "group" not in found.details
        return found if is_of_group and found.details["address"] is None else None
    if isinstance(found, FirnError) or not found:
        return None
    refusals = [masterless(each) if isinstance(each, FirnError) else None for each in found]
    return None if None in refusals else refusals[0]


async def named(context: Context, error: FirnError) -> FirnError:
    """The error as it is once a master is known, or after ``HELD_S``."""
    if masterless(error) is None or (group := context.broker.group) is None:
        return error
    await group.until_master_named(HELD_S)
    return error if group.is_master and not group.is_settled else group.not_master()


async def refuse_named(context: Context, error: FirnError) -> None:
    """Errors: as ``named`` gives it."""
    raise await named(context, error)
