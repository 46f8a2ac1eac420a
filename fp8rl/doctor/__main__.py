"""`python -m fp8rl.doctor`: will few bits do in this training? See command.py."""

import signal

if __name__ == "__main__":
    # Ctrl-C during the imports ends the program without a traceback
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

    from .command import main

    signal.signal(signal.SIGINT, on_interrupt)  # the script's, as if it ran by itself
    main()
