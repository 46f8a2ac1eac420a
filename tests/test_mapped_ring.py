import contextlib
import itertools
import json
import os

import pytest
import torch
from helpers import WIDE, coded, noise, refused, ring_of, same

from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.replay.observation_codec import CODECS


def test_a_ring_in_memory_is_saved_and_one_in_a_folder_is_its_own_copy(tmp_path):
    memory, folder = ring_of(10, 2, WIDE), ring_of(10, 2, WIDE, folder=tmp_path / "ring")
    memory.append(coded(0, 7, 2))
    assert folder.state_dict() == {"folder": str(tmp_path / "ring")}
    folder.load_state_dict(memory.state_dict())
    folder.append(coded(7, 2, 2))  # it is the same run's
    assert folder.sample(1, 9).obs[:, 0, 0].tolist() == list(range(10))
    message = "memmap is .*another run's ring"
    refused(message, folder.load_state_dict, memory.state_dict(), error=OSError)


GOOD = coded(8, 4, 2)
NAN = torch.full((5, 2, 2), torch.nan)
MISFITS = [  # field, rollout
    ("obs", coded(8, 4, 1)),
    ("obs", noise(8, 4, 2, 3)),
    ("obs", GOOD._replace(obs=torch.zeros(4, 2, 2))),
    ("reward", GOOD._replace(reward=torch.zeros(3, 2))),
    ("action", GOOD._replace(action=torch.full((4, 2), 300))),
    ("action", GOOD._replace(action=torch.full((4, 2), -1))),
    ("obs", GOOD._replace(obs=NAN)),
    ("reward", GOOD._replace(reward=NAN[:4, :, 0])),
    ("behavior_logp", GOOD._replace(behavior_logp=NAN[:4, :, 0])),
]


def test_a_rollout_that_does_not_fit_is_refused_and_leaves_the_ring_as_it_was():
    ring = ring_of(10, 2, WIDE)
    ring.append(coded(0, 8, 2))
    before = ring.sample(1, 8)
    for field, rollout in MISFITS:
        refused(f"{field} ", ring.append, rollout)
        assert ring.size == 8 and same(ring.sample(1, 8), before)


# In a folder


def folder_of(tmp_path, **kind) -> tuple:
    ring = ring_of(10, 2, WIDE, folder=tmp_path / "ring", **kind)
    ring.append(coded(0, 7, 2))
    ring.append(coded(7, 7, 2))
    return tmp_path / "ring", ring


def test_a_folder_holds_what_ram_would(tmp_path):
    for codec in CODECS:
        folder = tmp_path / codec
        rings = [ring_of(10, 2, codec=codec, folder=place) for place in (None, folder)]
        for start in (0, 7, 14):
            for ring in rings:
                ring.append(noise(start, 7, 2))
        in_ram, mapped = (ring.sample(30, 4) for ring in rings)
        assert same(in_ram, mapped)
        rings[1].close()
        again = MappedRing.open(folder)
        assert same(in_ram, again.sample(30, 4)) and again.codec.name == codec


def test_reopened_to_go_on_it_puts_a_seam(tmp_path):
    folder, ring = folder_of(tmp_path)
    del ring
    ring = MappedRing.open(folder)
    ring.append(coded(500, 3, 2))
    assert ring.sample(1, 9).obs[:, 0, 0].tolist() == [9, 10, 11, 12, 13, 14, 500, 501, 502, 503]


def test_a_folder_has_one_writer(tmp_path):
    folder, ring = folder_of(tmp_path)
    refused("memmap is .*another ring", MappedRing.open, folder, error=OSError)
    del ring
    MappedRing.open(folder)


def edit(folder, **changes):
    about = json.loads((folder / "ring.json").read_text())
    (folder / "ring.json").write_text(json.dumps(about | changes))


DAMAGES = [  # what is damaged, how, and the error
    ("obs.bin", lambda folder: os.truncate(folder / "obs.bin", 159), ValueError),
    ("obs.bin", lambda folder: edit(folder, rows=11), ValueError),
    ("No such file", lambda folder: (folder / "reward.bin").unlink(), OSError),
    ("ring.json", lambda folder: os.truncate(folder / "ring.json", 20), ValueError),
    ("format", lambda folder: edit(folder, format="fp8rl-ring-2"), ValueError),
    ("no complete ring", lambda folder: (folder / "ring.json").unlink(), OSError),
]


@pytest.mark.parametrize(("what", "damage", "error"), DAMAGES)
def test_a_damaged_folder_is_refused(what, damage, error, tmp_path):
    folder, ring = folder_of(tmp_path)
    ring.close()
    damage(folder)
    refused(f"memmap is {folder},? .*{what}", MappedRing.open, folder, error=error)


OTHERS = {"rows": 11, "num_envs": 3, "codec": "int8", "bounds": ((-9.0, -9.0), (9.0, 9.0))}


def test_a_folder_of_another_config_is_refused(tmp_path):
    folder, ring = folder_of(tmp_path)
    ring.close()
    for name, value in OTHERS.items():
        settings = {"rows": 10, "num_envs": 2, "bounds": WIDE, "folder": folder} | {name: value}
        refused("memmap is .*, whose ring has ", ring_of, **settings)
    assert MappedRing.open(folder).size == 9


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("kept")
    for rows, folder in (
        (10, tmp_path / "file"),
        (10, tmp_path),  # holds files but no ring
        (10**15, tmp_path / "large"),  # needs more than the disk has
    ):
        refused("memmap is ", ring_of, rows, 2, folder=folder, error=OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_an_append_cut_short_gives_up_only_what_it_was_overwriting(tmp_path, monkeypatch):
    """As when a writer is killed: it stops after each single store."""
    for stop in range(20):
        folder = tmp_path / str(stop)
        ring = ring_of(10, 2, WIDE, folder=folder)
        ring.append(coded(0, 7, 2))
        stores = itertools.count()

        def counted(tensor, key, value, store=torch.Tensor.__setitem__, stores=stores, stop=stop):
            if next(stores) == stop:
                raise KeyboardInterrupt
            store(tensor, key, value)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(torch.Tensor, "__setitem__", counted)
            ring.append(coded(7, 6, 2))
        del ring
        ring = MappedRing.open(folder)
        is_whole = next(stores) <= stop
        assert ring.count == (13 if is_whole else 7)
        assert ring.size == (9 if is_whole else 7 if stop == 0 else 3)
        obs = ring.sample(1, ring.size).obs[:, 0, 0]
        assert obs.tolist() == list(range(ring.start, ring.count + 1))
    assert is_whole
