"""Brings the doctor into the process of a script.

Python imports a module of this name before it runs a script. `launch` (__main__.py) puts this
folder in front of PYTHONPATH, so this is the one that Python finds. The script, and the processes
that it starts, see nothing of it: neither the folder nor the two variables of the environment.
"""

import importlib
import json
import os
import sys

folder = os.path.dirname(__file__)
sys.path.remove(folder)
options = json.loads(os.environ.pop("FP8RL_DOCTOR"))
if options["PYTHONPATH"] is None:
    del os.environ["PYTHONPATH"]
else:
    os.environ["PYTHONPATH"] = options["PYTHONPATH"]

sys.path.insert(0, options["package"])
importlib.import_module("fp8rl.doctor.attach").Attached(**options["doctor"]).install()
sys.path.remove(options["package"])

# The module that this one hides. Where there is none, Python expects this ImportError.
del sys.modules["sitecustomize"]
importlib.import_module("sitecustomize")
