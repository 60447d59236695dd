"""``python -m oppo`` is ``oppo``."""

import sys

from oppo.cli import main

if __name__ == "__main__":
    sys.exit(main())
