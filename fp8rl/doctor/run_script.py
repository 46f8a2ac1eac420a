"""Runs a script, or a module, in this process as Python itself would.

`python script.py` and `python -m module` run code as the module `__main__`, and this module stays
until the process ends: handlers of atexit, threads and pickles look it up. Python hands an error to
sys.excepthook, and it waits for the script's threads before it ends. So does `Target.exit_code`.

Nothing here imports torch or NumPy. A script may set what they read when they are imported, such as
OMP_NUM_THREADS. `AfterImport` calls a function as soon as the script has imported one of them.
"""

import builtins
import contextlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import NamedTuple


class Refusal(Exception):
    """An error in the command, with a message of one line."""


def reason(error: Exception) -> str:
    """Why something failed, in one line, without a number or a path."""
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def say(text: str) -> None:
    """Prints lines to the stderr that this process was started with.

    Where stderr is closed, or full, or a pipe that nobody reads, they are lost, and nothing else
    changes. So they are not left in the buffer of sys.stderr, which Python would fail to write at
    its end.
    """
    stderr = sys.__stderr__
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be None
        stderr.flush()
        with open(stderr.fileno(), "w", encoding="utf-8", errors="replace", closefd=False) as file:
            print(text, file=file)


def print_out(text: str) -> None:
    """Prints lines to stdout. Raises Refusal if that is not possible, but not if their reader has
    seen enough, as `head` has."""
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Refusal(f"stdout cannot be written: {reason(error)}") from error


class Program(NamedTuple):
    """Code that is ready to run, and what Python sets in `__main__` before it runs."""

    code: types.CodeType
    attributes: dict[str, object]


class Target(NamedTuple):
    """A script or a module, and its arguments."""

    name: str
    arguments: list[str]
    is_module: bool

    def exit_code(self) -> int:
        """Runs the script or module as `__main__`, and waits for its threads. Returns its exit
        code.

        An error goes to sys.excepthook. Its traceback has only the script's own frames. Afterwards,
        `__main__` is still the script's. Raises Refusal for a script that does not exist.
        """
        main = types.ModuleType("__main__")
        vars(main).update(__annotations__={}, __builtins__=builtins)
        sys.modules["__main__"] = main
        code = 0
        try:
            program = self.load()
            vars(main).update(program.attributes)
            exec(program.code, vars(main))
        except Refusal:
            raise
        except BaseException as error:
            code = code_after(error)
        try:
            wait_for_threads()
        except KeyboardInterrupt as error:
            code = code_after(error)
        return code

    def load(self) -> Program:
        """The script or module as code. Sets sys.argv and sys.path as Python does."""
        if self.is_module:
            sys.argv = ["-m", *self.arguments]  # so packages around the module see it
            program = load_module(self.name)
            sys.argv = [program.attributes["__file__"], *self.arguments]
            return program
        program = load_script(self.name)
        sys.argv = [self.name, *self.arguments]
        # Where Python is asked not to, it has no such entry (-P, since 3.11, and -I)
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):
            sys.path[0] = str(Path(self.name).resolve().parent)
        return program


def load_script(name: str) -> Program:
    """Reads a script. Raises Refusal for a file that cannot be read, and the script's own
    SyntaxError."""
    path = os.path.join(os.getcwd(), name)  # normalized by nobody: a/.. may lead through a link
    is_compiled = name.endswith(".pyc")
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
    try:
        content = loader.get_data(path)
    except FileNotFoundError as error:
        raise Refusal(f"script is {name}: there is no such file") from error
    except IsADirectoryError as error:
        raise Refusal(f"script is {name}, which is a folder: name a file in it") from error
    except (OSError, ValueError) as error:
        raise Refusal(f"script is {name}, which cannot be read: {reason(error)}") from error
    if is_compiled:
        code = loader.get_code("__main__")
    else:
        # Not get_code, which would write a compiled file beside the script
        code = loader.source_to_code(content, path)
    return Program(code, attributes_of_main(path, None, loader, None, None))


def load_module(name: str) -> Program:
    """Finds a module, and imports the packages around it, as Python does.

    Raises Refusal for a module that does not exist, and the errors of the packages around it.
    """
    if name.startswith("."):
        raise Refusal(f"module is {name}: write its whole name, without a dot before it")
    try:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if not spec:
                raise Refusal(f"module is {name}, which is a package: name a module in it")
    except ModuleNotFoundError as error:
        if error.name and not f"{name}.".startswith(f"{error.name}."):
            raise  # one that the packages around it need
        spec = None
    except ValueError:  # a name that no module can have, or a module without a spec
        spec = None
    if not spec:
        raise Refusal(f"module is {name}: there is no such module")
    read_code = getattr(spec.loader, "get_code", None)
    code = read_code(spec.name) if read_code else None
    if code is None:
        raise Refusal(f"module is {name}, which is not written in Python: name another one")
    attributes = attributes_of_main(spec.origin, spec.cached, spec.loader, spec.parent, spec)
    return Program(code, attributes)


def attributes_of_main(file, cached, loader, package, spec) -> dict[str, object]:
    """What Python sets in `__main__`. For a script, `__spec__` is None: processes that
    multiprocessing starts tell by it whether they import a module or run a file."""
    return {
        "__name__": "__main__",
        "__doc__": None,
        "__package__": package,
        "__loader__": loader,
        "__spec__": spec,
        "__file__": file,
        "__cached__": cached,
    }


# How a script ends


def code_after(error: BaseException) -> int:
    """The exit code of a script that an error has ended. Shows the error as Python does."""
    if not isinstance(error, SystemExit):
        try:
            show(error)
        except SystemExit as end:  # of the script's hook
            return code_after(end)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    say(str(error.code))
    return 1


def show(error: BaseException) -> None:
    """Hands an error of the script to sys.excepthook, as Python does at a script's end.

    Ctrl-C is one line, unless the script has a hook of its own.
    """
    if isinstance(error, KeyboardInterrupt) and sys.excepthook is sys.__excepthook__:
        say("fp8rl.doctor: the script was interrupted")
        return
    frames = frames_of_script(error.__traceback__)
    error.__traceback__ = frames
    # For debuggers, which look at the last error that nobody has caught
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    sys.last_exc = error
    try:
        sys.excepthook(type(error), error, frames)
    except Exception as error_of_hook:
        trace_of_hook = traceback.format_exception(error_of_hook.with_traceback(None))
        say("".join(["Error in sys.excepthook:\n", *trace_of_hook]))
        say("".join(["Original exception was:\n", *traceback.format_exception(error)]))


def frames_of_script(frames: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames at its beginning that load and run the script.

    There may be none left, as of a script that is no Python.
    """
    loading = {__file__, importlib.util.__file__}
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in loading and not file.startswith("<frozen importlib"):
            break
        frames = frames.tb_next
    return frames


def wait_for_threads() -> None:
    """Waits for the script's threads, but for daemons, as Python does before a process ends.

    Executors end their threads in the same function of `threading`, which has no public name. It
    does nothing when Python calls it once more.
    """
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        threading._shutdown()


ENDINGS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]  # what schedulers and terminals send


@contextlib.contextmanager
def before_termination(function: Callable[[], None]) -> Iterator[None]:
    """Calls a function before SIGTERM or SIGHUP ends this process.

    A signal that is ignored, or for which the script installs a handler, is the script's. A fork of
    the script has no handler, and loses no signal: they wait until its handlers are put back.
    """
    blocked_before: list[set] = []  # signals, by fork

    def end(number: int, frame) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            function()
        finally:
            os.kill(os.getpid(), number)  # the exit code is the signal's, as without a handler

    def restore() -> None:
        for number in ENDINGS:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)

    def block() -> None:
        blocked_before.append(signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before.pop())

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers
        return
    for number in ENDINGS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=block, after_in_parent=unblock, after_in_child=lambda: (restore(), unblock())
        )
    try:
        yield
    finally:
        restore()


class AfterImport:
    """Calls a function once, right after a module has been imported, or at once if it has been.

    It is a finder of sys.meta_path: it lets the other finders find the module, and has the module's
    loader call the function after the module's code. `module` must be at the top level.
    """

    def __init__(self, module: str, function: Callable[[], None]):
        self.module = module
        self.function = function
        self.is_searching = False

    def __enter__(self) -> None:
        if self.module in sys.modules:
            self.function()
        else:
            sys.meta_path.insert(0, self)

    def __exit__(self, *error) -> None:
        self.remove()

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path=None, target=None):
        """The other finders' answer for this module, and None for any other module."""
        if name != self.module or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module  # the class has the loader's own
            loader.exec_module(module)
            self.function()
            self.remove()  # not before: a script may try again after an import that failed

        loader.exec_module = exec_module
        return spec
