"""A script under the doctor is the script: it sees and does what it does under Python alone.

Most of these scripts do not import torch, and then the doctor does not either. So each takes a
tenth of a second, in a process of its own.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

WATCH = ("-m", "fp8rl.doctor", "watch")
NOTHING = "\nfp8rl.doctor:\nno optimizer of torch made a step: there is nothing to judge\n"


def python(*arguments, cwd: Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


def assert_the_same(*arguments, cwd: Path, python_options=(), **options) -> str:
    """The output, error output and exit code of `python script.py` and of the doctor's command are
    the same, but for the report. Returns the output."""
    alone = python(*python_options, *arguments, cwd=cwd, **options)
    watched = python(*python_options, *WATCH, *arguments, cwd=cwd, **options)
    assert watched.stdout == alone.stdout
    assert watched.stderr == alone.stderr + NOTHING
    assert watched.returncode == alone.returncode
    return alone.stdout


def write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


WHAT_IT_SEES = """
    import dataclasses, inspect, io, os, pickle, sys, typing, warnings

    before = {name: repr(value) for name, value in globals().items() if "__" in name}
    before["__loader__"] = type(__loader__).__name__, __loader__.name, __loader__.path
    before["__spec__"] = __spec__ and (__spec__.name, __spec__.origin, __spec__.parent)
    print(sorted(before.items()))
    print(sys.argv, sys.path[0], os.getcwd(), sys.flags.optimize, sys.stdin.read())
    print([name for name in ("torch", "numpy") if name in sys.modules])
    print(warnings.filters, sys.excepthook is sys.__excepthook__, sys.gettrace())


    @dataclasses.dataclass
    class Point:
        x: "Number" = 1


    Number = int
    print(typing.get_type_hints(Point), inspect.getsource(Point))
    print(pickle.loads(pickle.dumps(Point(3))), sys.modules["__main__"].Point is Point)
    warnings.warn("shown only in __main__", DeprecationWarning)
    os.chdir("/")
    print(os.path.exists(__file__), __name__ == "__main__", len(inspect.getsourcelines(Point)))
"""


def test_a_script_sees_what_python_shows_it(tmp_path):
    """In another folder, behind a link, and with options of Python."""
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "script.py", WHAT_IT_SEES)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    words = ["./real/../real/script.py", "--lr", "1", "-m", "--json"]
    printed = assert_the_same(*words, cwd=tmp_path, input="typed")
    assert "typed" in printed and "\n[]\n" in printed
    assert_the_same("link.py", cwd=tmp_path, input="", python_options=["-O", "-W", "ignore"])
    if sys.version_info >= (3, 11):
        assert_the_same("link.py", cwd=tmp_path, input="", python_options=["-P"])


def test_a_module_and_a_package_see_what_python_shows_them(tmp_path):
    (tmp_path / "package").mkdir()
    init = "import sys; print(sys.argv, sorted(vars(sys.modules['__main__'])))"
    write(tmp_path / "package" / "__init__.py", init)
    write(tmp_path / "package" / "other.py", "VALUE = 3")
    for name in ("train", "__main__"):
        source = textwrap.dedent(WHAT_IT_SEES) + "from . import other\nprint(other.VALUE)\n"
        write(tmp_path / "package" / f"{name}.py", source)
    for module in ("package.train", "package"):
        assert_the_same("-m", module, "--its", "own", cwd=tmp_path, input="")


ENDS = {
    "text": "import sys; sys.exit('a text')",
    "none": "raise SystemExit",
    "above 255": "import sys; sys.exit(256 + 7)",
    "error": """
        def f():
            raise KeyError("own")

        try:
            f()
        except KeyError as error:
            raise ValueError("other") from error
    """,
    "syntax": "print(1",
    "hook": """
        import sys
        def hook(kind, error, trace):
            print("logged:", kind.__name__, trace.tb_lineno)
            sys.exit(9)
        sys.excepthook = hook
        raise KeyboardInterrupt
    """,
    "hook of a thread": """
        import threading
        threading.excepthook = lambda arguments: print("logged:", arguments.exc_type.__name__)
        threading.Thread(target=lambda: 1 / 0).start()
    """,
    "deleted late": """
        class Noisy:
            def __del__(self):
                print("deleted", __name__)
        noisy = Noisy()
    """,
    "thread": """
        import threading, time
        def work():
            time.sleep(0.3)
            print("worked", main is threading.main_thread(), flush=True)
        main = threading.main_thread()
        threading.Thread(target=work).start()
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        raise SystemExit("main has ended")
    """,
    "executor": """
        import time
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        for number in range(4):
            pool.submit(lambda: (time.sleep(0.1), print("worked")))
    """,
    "terminated child": """
        import multiprocessing, time
        if __name__ == "__main__":
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
            process.start()
            process.terminate()
            process.join()
            print(process.exitcode)
    """,
    "fork": """
        import os, sys
        if not os.fork():
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """,
    "processes": """
        import multiprocessing, os

        class Net:
            pass

        def work(net):
            print(type(net), __name__, __file__ if __spec__ is None else __spec__.name, flush=True)

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                process = multiprocessing.get_context(method).Process(target=work, args=[Net()])
                process.start()
                process.join()
                print(process.exitcode, flush=True)
    """,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_it_does_alone(end, tmp_path):
    write(tmp_path / "script.py", ENDS[end])
    assert_the_same("script.py", cwd=tmp_path)


STREAMS = ("2>&-", "2>/dev/full", "2> >(:)", ">&-", ">&- 2>&-", ">/dev/full 2>&1")


@pytest.mark.parametrize("streams", STREAMS)
def test_streams_that_are_closed_or_full_change_no_exit_code(streams, tmp_path):
    """And what would go to stderr does not go to stdout instead."""
    write(tmp_path / "script.py", "import sys; sys.exit(int(sys.argv[1]))")
    expected = {"watch script.py 0": 0, "watch script.py 3": 3}
    expected |= {"keep v=bf16 script.py 0": 2, "watch none.py": 2, "watch --list": 0}
    expected["watch --list"] = 2 if streams.startswith(">/dev/full") else 0
    codes = {}
    for words in expected:
        line = f"{sys.executable} -m fp8rl.doctor {words} {streams}"
        ended = python("-c", SHELL, line, cwd=tmp_path)
        codes[words] = ended.returncode
        assert ended.stdout == "" or words == "watch --list"
    assert codes == expected


SHELL = "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])"


def test_main_is_the_script_s_to_the_end(tmp_path):
    """Its handlers run after the report."""
    source = """
        import atexit, pickle, sys, threading, time

        class Net:
            pass

        def save():
            print("saved", len(pickle.dumps(Net())), sys.modules["__main__"].Net is Net)

        def later():
            time.sleep(0.2)
            save()

        atexit.register(save)
        atexit.register(lambda: print("the handlers run", file=sys.stderr))
        threading.Thread(target=later).start()
    """
    write(tmp_path / "script.py", source)
    alone = python("-m", "script", cwd=tmp_path)
    watched = python(*WATCH, "-m", "script", cwd=tmp_path)
    assert watched.stdout == alone.stdout and alone.stdout.count("saved") == 2
    assert watched.stderr == NOTHING + alone.stderr and watched.returncode == 0


def test_the_script_is_the_first_to_import_torch(tmp_path):
    """So it may set variables that torch and NumPy read then. Torch's module looks as always."""
    source = """
        import importlib.util, os, sys
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "1"
        print(importlib.util.find_spec("torch").origin)
        import torch
        print(torch.get_num_threads(), torch.__spec__.loader.name, *vars(torch.__loader__))
    """
    write(tmp_path / "script.py", source)
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    watched = python(*WATCH, "script.py", cwd=tmp_path, env=environment)
    spec = importlib.util.find_spec("torch")
    attributes = " ".join(vars(spec.loader))
    assert watched.stdout == f"{spec.origin}\n1 torch {attributes}\n"
    assert (watched.stderr, watched.returncode) == (NOTHING, 0)


def test_a_refused_command_starts_no_script_and_leaves_no_report(tmp_path):
    """The messages are tested in test_doctor_command.py."""
    write(tmp_path / "script.py", "print('started')")
    for words in (("--formats", "weights=e99m1", "script.py"), ("-m", "no_module")):
        ended = python(*WATCH, "--json", "new.json", *words, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert not (tmp_path / "new.json").exists()


def test_a_report_goes_to_the_folder_in_which_the_command_was_given(tmp_path):
    write(tmp_path / "script.py", "import os; os.chdir('/')")
    python(*WATCH, "--json", "r.json", "script.py", cwd=tmp_path)
    assert "there is nothing to judge" in (tmp_path / "r.json").read_text()


def test_keep_says_that_nothing_was_changed(tmp_path):
    write(tmp_path / "script.py", "print('trained')")
    ended = python("-m", "fp8rl.doctor", "keep", "weights=bf16", "script.py", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "trained\n")
    assert ended.stderr.endswith("made a step: nothing was changed\n")


SLOW = """
    import signal, sys, time
    {before}
    print("ready", flush=True)
    time.sleep(60)
"""


def started(folder: Path, before: str = "") -> subprocess.Popen:
    """A watched script that waits, with a report in r.json."""
    write(folder / "script.py", SLOW.format(before=before))
    process = subprocess.Popen(
        [sys.executable, *WATCH, "--json", "r.json", "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_run_does_not_block_the_next_and_a_running_one_does(tmp_path):
    process = started(tmp_path)
    ended = python(*WATCH, "--json", "r.json", "script.py", cwd=tmp_path)
    said = "json is r.json, which another script is about to fill: name a new file"
    assert ended.returncode == 2 and said in ended.stderr
    process.kill()
    process.communicate()
    assert (tmp_path / "r.json").read_text() == ""  # nobody's
    write(tmp_path / "script.py", "pass")
    assert python(*WATCH, "--json", "r.json", "script.py", cwd=tmp_path).returncode == 0
    assert (tmp_path / "r.json").read_text()


def test_a_signal_ends_a_script_as_it_does_alone_and_there_is_a_report(tmp_path):
    """SIGTERM, in the middle of a training, is tested in test_doctor_command.py."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("this process ignores the signal, as under nohup, and so do its children")
    process = started(tmp_path)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGHUP and err == NOTHING
    assert "there is nothing to judge" in (tmp_path / "r.json").read_text()


def test_a_script_has_handlers_of_its_own(tmp_path):
    own = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(4)))"
    process = started(tmp_path, own)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (4, "saved\n", NOTHING)


def test_no_link_or_device_is_taken_for_an_empty_file(tmp_path):
    write(tmp_path / "script.py", "print('started')")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("link", "/dev/null"):
        ended = python(*WATCH, "--json", name, "script.py", cwd=tmp_path)
        assert ended.returncode == 2 and not ended.stdout and "which exists" in ended.stderr
