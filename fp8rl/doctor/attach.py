"""The doctor in the process of a script: waits for torch, and reports when the process ends.

bootstrap/sitecustomize.py installs `Attached` before the script begins. Nothing here imports torch
or NumPy. A script may set what they read when they are imported, such as OMP_NUM_THREADS.
"""

import atexit
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

from . import NO_STEP, Refusal, first_line, report_as_json, say, write_report

ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # what schedulers and terminals send


class Attached:
    """Hooks on torch's optimizers, and what is said of them at the end of the process.

    `command`    watch or keep; Doctor and Keep are in the files of these names
    `arguments`  arguments of Doctor or Keep
    `json`       the file for the report of `watch`; None if it is not written

    It is a finder of sys.meta_path, too, which waits for torch. `hooks` is None as long as the
    script has not imported torch.
    """

    def __init__(self, command: str, arguments: dict, json: str | None = None):
        self.command = command
        self.arguments = arguments
        self.json = json
        self.reports = os.environ.get("RANK", "0") == "0"  # only the first rank of torchrun
        self.process = os.getpid()
        self.is_searching = False  # whether the other finders are looking for torch
        self.hooks = None
        self.context = contextlib.ExitStack()

    def install(self) -> None:
        """Prepares for torch's import, for the end of the process, and for signals that end it."""
        sys.meta_path.insert(0, self)
        atexit.register(self.end)  # the first that is registered is called last
        if self.command == "watch":
            self.handle_signals()

    def find_spec(self, name: str, path=None, target=None):
        """Has `attach` called once, right after the script has imported torch.

        Python calls this for each module that is imported, because sys.meta_path has this object.
        It returns the other finders' answer for torch, whose loader is to call `attach` after
        torch's code, and None for any other module.
        """
        if name != "torch" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader

        def exec_module(module) -> None:
            del loader.exec_module  # the class has the loader's own
            loader.exec_module(module)
            sys.meta_path.remove(self)  # not before: a script may try again after an error
            self.attach()

        loader.exec_module = exec_module
        return spec

    def attach(self) -> None:
        """Makes the hooks, right after the script has imported torch."""
        if os.getpid() != self.process:
            return  # a fork of the script
        module = importlib.import_module(f".{self.command}", __package__)
        kind = module.Doctor if self.command == "watch" else module.Keep
        self.hooks = kind(**self.arguments)
        if self.reports:
            self.hooks.tell = lambda text: say(f"fp8rl.doctor: {text}")
        if self.command == "watch":
            # Registered after torch's import, it is called before torch takes operators away
            atexit.register(self.hooks.replay)
        self.context.enter_context(self.hooks.installed())

    def end(self) -> None:
        """Says what there is to say. The script, its threads and its handlers of atexit have ended.

        If what was asked for could not be done, the exit code is 2, unless an error has ended the
        script.
        """
        if os.getpid() != self.process:
            return
        # From now on, the signals end the process at once, if the report takes long
        self.put_back_handlers()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be closed, or no stream at all
                stream.flush()
        self.context.close()
        if not self.conclude() and not hasattr(sys, "last_value"):
            os._exit(2)

    def conclude(self) -> bool:
        """Reports. Returns whether what was asked for was done, and says why if it was not."""
        try:
            if self.command == "watch":
                self.report()
            else:
                self.require_change()
        except Exception as error:
            say(f"fp8rl.doctor: {first_line(error)}")
            return False
        return True

    def report(self) -> None:
        """Says what `watch` has found."""
        if not self.reports:
            return
        if self.hooks is None:
            text = f"{NO_STEP}: there is nothing to judge"
            content = report_as_json([], [text])
        else:
            findings = self.hooks.report()
            text = str(findings)
            content = self.hooks.to_json(findings)
        say(f"\nfp8rl.doctor:\n{text}")
        if self.json:
            write_report(Path(self.json), content)

    def require_change(self) -> None:
        """Raises Refusal if `keep` has not, or not wholly, done what was asked for."""
        if self.hooks is None or not self.hooks.names:
            raise Refusal(f"{NO_STEP}: nothing was changed")
        if complaint := self.hooks.refusal or self.hooks.complaint():
            raise Refusal(complaint)

    def handle_signals(self) -> None:
        """Has the steps so far reported before SIGTERM or SIGHUP ends the process.

        A signal that is ignored, or for which the script installs a handler, is the script's. A
        fork of the script has no handler, and loses no signal: they wait until its handlers are put
        back.
        """
        blocked_before: list[set] = []  # signals, by fork

        def block() -> None:
            blocked_before.append(signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS))

        def unblock() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before.pop())

        for number in ENDINGS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self.end_by_signal)
        os.register_at_fork(after_in_child=self.put_back_handlers)  # before it unblocks them
        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)

    def end_by_signal(self, number: int, frame) -> None:
        """Reports, and ends the process by the signal, whose exit code it has."""
        self.put_back_handlers()
        try:
            self.report()
        except Exception as error:  # perhaps in the middle of a step
            say(f"fp8rl.doctor: there is no report: {first_line(error)}")
        finally:
            os.kill(os.getpid(), number)

    def put_back_handlers(self) -> None:
        for number in ENDINGS:
            if signal.getsignal(number) == self.end_by_signal:
                signal.signal(number, signal.SIG_DFL)
