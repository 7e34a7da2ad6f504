"""``python -m xds.cli``. Layer: top."""

from xds.cli import main

main()
