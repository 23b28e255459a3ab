"""Limits that hold at produce. What was accepted stays readable and compactable whatever they become."""

KEY_BYTES_MAX = 64 << 10
VALUE_BYTES_MAX = 16 << 20
BATCH_BYTES_MAX = 32 << 20
BATCH_RECORDS_MAX = 65_536
TAG_BYTES_MAX = 255
QUEUES_PER_RECORD_MAX = 64
QUEUE_NAME_BYTES_MAX = 255
HEADERS_BYTES_MAX = 64 << 10
TOPIC_NAME_CHARS_MAX = 249
PARTITIONS_MAX = 100_000
GROUP_NAME_BYTES_MAX = 255

# A WebSocket message of 64 KiB was carried at twice the rate of one of 1 MiB.
FRAME_BYTES_MAX = 64 << 10
PRODUCE_REQUEST_BYTES_MAX = 64 << 20
UNACKNOWLEDGED_BATCHES_MAX = 64  # per producer and partition: what its remembered sequences can answer
