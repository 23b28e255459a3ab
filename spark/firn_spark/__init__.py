"""firn for Spark: the data source, the forced compaction, and the jobs around them."""
