"""Starts the command line (cli/main.py).

This file must be readable for older versions of Python, so that they can print which version is
needed.
"""

import signal
import sys

from .cli import overview
from .command_help import name_missing_package, require_python

if __name__ == "__main__":
    # Ctrl-C during the imports ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    require_python("fp8rl")
    if overview.is_wanted(sys.argv[1:]):
        print(overview.page())
        sys.exit(0)

try:
    from .cli.main import main
except ImportError as error:
    if __name__ == "__main__":
        name_missing_package("fp8rl", error)
    raise

if __name__ == "__main__":
    main()
