"""One part, see the package."""

import sys

from light import main

main(*sys.argv[1:])
