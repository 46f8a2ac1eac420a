"""Starts the command line (cli/main.py).

This file must be readable for older versions of Python, so that they can print which version is
needed.
"""

import signal
import sys

from .cli import overview

if __name__ == "__main__":
    # Ctrl-C during the imports ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:3]))
        needs = "fp8rl: needs Python 3.10 or newer, and this is " + version
        sys.stderr.write(needs + ": use another one, as in python3.12 -m fp8rl\n")
        sys.exit(2)
    if overview.is_wanted(sys.argv[1:]):
        print(overview.page())
        sys.exit(0)

try:
    from .cli.main import main
except ModuleNotFoundError as error:
    missing = (error.name or "fp8rl").split(".")[0]
    if __name__ != "__main__" or missing == "fp8rl":
        raise
    needs = "fp8rl: the package " + missing + " is missing: install it with pip install " + missing
    sys.stderr.write(needs + ", or all that are needed with pip install -r requirements.txt\n")
    sys.exit(2)

if __name__ == "__main__":
    main()
