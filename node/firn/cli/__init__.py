"""The command ``firn``. Imports only ``firn``; commands of the broker's packages come by entry points."""
