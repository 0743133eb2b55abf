"""`python -m wassail`."""

import sys

from wassail.cli.parser import main

sys.exit(main())
