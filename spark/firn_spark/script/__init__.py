"""The one file that spark-submit is given, alone in its folder."""
