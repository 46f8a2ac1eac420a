"""Starts the command line (cli/main.py)."""

import gc
import signal

if __name__ == "__main__":
    # Ctrl-C during the imports, which take seconds, ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The garbage collector would go through all of torch's objects several times during the
    # imports, and again when the program ends. That takes half a second and finds next to nothing.
    gc.disable()

from .cli.main import main

if __name__ == "__main__":
    gc.freeze()  # what is imported so far is left out of all collections
    gc.enable()
    main()
