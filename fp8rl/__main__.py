"""Starts the command line (cli/main.py)."""

import gc
import signal

if __name__ == "__main__":
    # Ctrl-C during the imports, which take seconds, ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # No garbage is to be found in what is imported. The collector would go through all of torch
    # several times, and once more at the end, which is a third of the time of a short training.
    gc.disable()

from .cli.main import main

if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main()
