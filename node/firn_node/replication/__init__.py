"""Replication of a group's log: the rules as one pure state machine per node, without sockets, clocks or files.

``core.step(state, event, now) -> (state, actions)`` is the door. ``record``: the group's record in the
coordinator; ``messages``: what replicas say; ``events``: what happens and what is ordered; ``state``: what a node
knows; ``rules``: who may do what; ``mastership``, ``standby``, ``election``: what each role does.
"""

PATH = "/v1/replicate"  # where replicas speak to one another
