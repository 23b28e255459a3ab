"""Integers that must not be mixed up.

An *offset* numbers a record within its partition, a *position* is a byte address in the commit log, an
*epoch* numbers a mastership. Ranges are half open: ``[start, end)``.
"""

from typing import NewType

Offset = NewType("Offset", int)
Position = NewType("Position", int)
Epoch = NewType("Epoch", int)
TopicId = NewType("TopicId", int)

# The internal topics have fixed ids. A user topic's id tells the position of the record that created it
# (``firn_node.engine.topicids``), a multiple of 8, so these can never meet one.
TOPICS_TOPIC_ID = TopicId(1)
OFFSETS_TOPIC_ID = TopicId(2)
TOPICS_TOPIC = "__topics"
OFFSETS_TOPIC = "__offsets"
