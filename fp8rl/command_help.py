"""What a command says to a newcomer: that Python is too old, that a package is missing, or which
word was probably meant.

This file must be readable for older versions of Python, so that they can say what is needed.
"""

import difflib
import sys

OLDEST = (3, 10)


def require_python(program):
    """Ends the process with one line if this Python is too old. `program`: as in python -m fp8rl,
    the word after -m."""
    if sys.version_info >= OLDEST:
        return
    version = ".".join(map(str, sys.version_info[:3]))
    needs = program + ": needs Python 3.10 or newer, and this is " + version
    sys.stderr.write(needs + ": use another one, as in python3.12 -m " + program + "\n")
    sys.exit(2)


def name_missing_package(program, error):
    """Ends the process with one line that names the package which an ImportError is about.

    Returns if the error is of another kind, such as a mistake in this package. Then the caller
    raises it.
    """
    package = (error.name or "fp8rl").split(".")[0]
    if package == "fp8rl":
        return
    if isinstance(error, ModuleNotFoundError):
        needs = "the package " + package + " is missing: install it with pip install " + package
    elif str(error).startswith("cannot import name"):
        needs = "the package " + package + " is too old: renew it with pip install -U " + package
    else:
        return
    everything = ", or all that are needed with pip install -r requirements.txt\n"
    sys.stderr.write(program + ": " + needs + everything)
    sys.exit(2)


def nearest(word, names):
    """A question after the name that is most like a word, or None if none is like it."""
    without_dashes = {name.lstrip("-"): name for name in names}
    found = difflib.get_close_matches(word.lstrip("-"), without_dashes, n=1)
    return "did you mean " + without_dashes[found[0]] + "?" if found else None
