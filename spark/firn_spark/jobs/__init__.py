"""What the jobs around forced compaction share: options, reports, the map of a topic, tasks."""
