"""The file that spark-submit is given: ``spark-submit $(python -m firn_spark script) NAME ARGUMENTS...``.

It lies in a folder of its own: spark-submit puts the folder of its file first on the path of imports, and there
the names of Python's own modules must mean these, not modules of ``firn_spark``.
"""

import sys

from firn_spark.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
