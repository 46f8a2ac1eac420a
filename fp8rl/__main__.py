"""Starts the command line (cli/main.py)."""

import signal

if __name__ == "__main__":
    # Ctrl-C during the imports, which take seconds, ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .cli.main import main

if __name__ == "__main__":
    main()
