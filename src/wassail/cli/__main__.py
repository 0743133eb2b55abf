"""`python -m wassail.cli`."""

import sys

from wassail.cli.parser import main

sys.exit(main())
