"""`python -m fp8rl.doctor`: will few bits do in this training? See command.py.

This file must be readable for older versions of Python, so that they can say what is needed. Its
page is printed before anything is imported that takes long, or that may be missing.
"""

import signal
import sys

from ..command_help import require_python

PAGE = """\
fp8rl.doctor answers whether few bits will do in a training of yours, for any
PyTorch script, unchanged.

usage: python -m fp8rl.doctor COMMAND [OPTIONS] SCRIPT [ITS OWN ARGUMENTS]

  watch     train in float32 as always, and report on each format at the end
  keep      train with the weights, or another place, really kept in few bits
  twin      train in float32 at the learning rates that watch has measured
  mismatch  compare a learner's and an actor's log-probabilities, from a file:
            do they differ by rounding or by a bug?

examples:
  python -m fp8rl.doctor watch --json report.json train.py --lr 1e-3
  python -m fp8rl.doctor keep weights=bf16 train.py --lr 1e-3
  python -m fp8rl.doctor twin weights=bf16 --report report.json train.py --lr 1e-3
  python -m fp8rl.doctor mismatch dump.npz

Write -m before a module, as in watch -m package.train.
python -m fp8rl.doctor COMMAND --help explains the options of a command."""

if __name__ == "__main__":
    # Ctrl-C during the imports ends the program without a traceback
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    require_python("fp8rl.doctor")
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(PAGE)
        sys.exit(0)

if __name__ == "__main__":
    from .command import main

    signal.signal(signal.SIGINT, on_interrupt)  # the script's, as if it ran by itself
    main()
