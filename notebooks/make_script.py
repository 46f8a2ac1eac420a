"""Writes actor_critic.py, one file that runs alone, from the cells of the main notebook.

It holds the cells that are tagged `script`, in their order. `make script` calls this file.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
HEAD = '''"""An actor-critic with a replay buffer, in mixed precision: one file, no package.

    python actor_critic.py --precision fp16 --seed 1 --steps 100000

trains a cart to stay near the middle of its track, and writes a curve and the numbers of each
iteration. It needs torch, numpy, gymnasium and matplotlib, and uses a GPU where there is one. Copy it,
and change what you like: CustomEnv is the task, corrected_update the algorithm. The notebook
fp8_actor_critic.ipynb explains each part; these are its cells, so change them there.
"""'''
FOOT = 'if __name__ == "__main__":\n    main()\n'


def script() -> str:
    """The text of actor_critic.py."""
    cells = json.loads((HERE / "fp8_actor_critic.ipynb").read_text())["cells"]
    tagged = [cell["source"] for cell in cells if "script" in cell["metadata"].get("tags", [])]
    imports, *parts = map("".join, tagged)
    return "\n\n\n".join((f"{HEAD}\n\n{imports}", *parts, FOOT))


if __name__ == "__main__":
    (HERE / "actor_critic.py").write_text(script())
