import itertools
import json
import os

import numpy as np
import pytest
import torch
from helpers import PATIENCE, SERVER, WIDE, coded, forked, noise, refused, ring_of, same

from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.replay.observation_codec import CODECS
from fp8rl.replay.ring import ring_bytes
from fp8rl.rollout import Rollout

WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}  # bytes of a feature


def test_predicted_bytes_are_the_measured_ones(tmp_path):
    for codec, width in WIDTHS.items():
        by_hand = 25 * 16 * (3 * width + 10)
        for folder in (None, tmp_path / codec):
            ring = ring_of(25, 16, ([-1.0] * 3, [1.0] * 3), codec, folder=folder)
            assert ring_bytes(25, 16, 3, codec) == ring.nbytes == by_hand
            ring.append(noise(0, 24, 16, 3))
            assert ring.nbytes == by_hand


def test_a_ring_in_memory_is_saved_and_one_in_a_folder_is_its_own_copy(tmp_path):
    memory, folder = ring_of(10, 2, WIDE), ring_of(10, 2, WIDE, folder=tmp_path / "ring")
    memory.append(coded(0, 7, 2))
    assert folder.state_dict() == {"folder": str(tmp_path / "ring")}
    folder.load_state_dict(memory.state_dict())
    folder.append(coded(7, 2, 2))  # it is the same run's
    assert folder.sample(1, 9).obs[:, 0, 0].tolist() == list(range(10))


def poisoned(name: str) -> Rollout:
    rollout = coded(8, 4, 2)
    getattr(rollout, name)[(2, 1, 1) if name == "obs" else (2, 1)] = torch.nan
    return rollout


GOOD = coded(8, 4, 2)
MISFITS = [  # field, rollout
    ("obs", coded(8, 4, 1)),
    ("obs", noise(8, 4, 2, 3)),
    ("obs", GOOD._replace(obs=torch.zeros(4, 2, 2))),
    ("reward", GOOD._replace(reward=torch.zeros(3, 2))),
    ("action", GOOD._replace(action=torch.full((4, 2), 300))),
    ("action", GOOD._replace(action=torch.full((4, 2), -1))),
    *((name, poisoned(name)) for name in ("obs", "reward", "behavior_logp")),
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


def test_reopened_to_read_it_never_changes(tmp_path):
    folder, ring = folder_of(tmp_path)
    del ring
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    reader, other = MappedRing.open(folder), MappedRing.open(folder)
    refused("the ring is closed or was opened for reading", reader.append, coded(14, 3, 2))
    reader.fields["reward"].fill_(99)  # a private copy
    assert other.sample(5, 3).reward.max() < 99
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_reopened_to_go_on_it_puts_a_seam(tmp_path):
    folder, ring = folder_of(tmp_path)
    del ring
    ring = MappedRing.open(folder, writable=True)
    ring.append(coded(500, 3, 2))
    assert ring.sample(1, 9).obs[:, 0, 0].tolist() == [9, 10, 11, 12, 13, 14, 500, 501, 502, 503]
    del ring
    ring = ring_of(10, 2, WIDE, folder=folder)  # of the same settings
    ring.append(coded(700, 3, 2))
    assert ring.sample(1, 6).obs[:, 0, 0].tolist() == [501, 502, 503, 700, 701, 702, 703]


def test_a_folder_has_one_writer(tmp_path):
    folder, ring = folder_of(tmp_path)
    for writable in (True, False):
        refused("memmap is .*another ring", MappedRing.open, folder, writable, error=OSError)
    del ring
    MappedRing.open(folder, writable=True)


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


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    large = tmp_path / "large"
    for settings in (
        {"rows": 10, "folder": tmp_path / "file"},
        {"rows": 10, "folder": tmp_path},  # holds files but no ring
        {"rows": 10**15, "folder": large},  # needs more than the disk has
    ):
        refused("memmap is ", ring_of, num_envs=2, error=OSError, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails)
        message = r"memmap is .*\(No space left on device\)"
        refused(message, ring_of, 10, 2, folder=tmp_path / "ring", error=OSError)
    ring_of(10, 2, folder=tmp_path / "ring")  # which left nothing in the way


def write_forever(folder, ready) -> None:
    ring, t = ring_of(50, 4, ((-1e9,), (1e9,)), folder=folder), 0
    ready.set()
    while True:
        n = 1 + t % 40
        time = torch.arange(t, t + n + 1.0).view(-1, 1).expand(-1, 4)
        zero = torch.zeros(n, 4)
        ring.append(
            Rollout(
                time.unsqueeze(-1).contiguous(), zero.long(), time[:-1], zero.byte(), -time[:-1]
            )
        )
        t += n


@pytest.mark.xdist_group("forked")
def test_a_killed_writer_leaves_whole_rows(tmp_path):
    for i, delay in enumerate(np.random.default_rng(0).uniform(0, 0.05, 4)):
        folder, ready = tmp_path / str(i), SERVER.Event()
        process = forked(write_forever, folder, ready)
        assert ready.wait(PATIENCE)
        process.join(delay)
        assert process.is_alive()
        process.kill()
        process.join()
        ring = MappedRing.open(folder)
        if ring.size:
            batch = ring.sample(1, ring.size)
            time = batch.obs[:, 0, 0]
            assert (time[1:] == time[:-1] + 1).all() and time[-1] == ring.count
            assert torch.equal(batch.reward[:, 0], time[:-1]) and torch.equal(
                batch.behavior_logp[:, 0], -time[:-1]
            )


def test_an_append_cut_short_gives_up_only_what_it_was_overwriting(tmp_path, monkeypatch):
    """The slow twin of the kill: stop after each single store."""
    stores = 0
    for stop in itertools.count():
        folder = tmp_path / str(stop)
        ring = ring_of(10, 2, WIDE, folder=folder)
        ring.append(coded(0, 7, 2))
        done = 0

        def counted(tensor, key, value, store=torch.Tensor.__setitem__, stop=stop):
            nonlocal done
            if done == stop:
                raise KeyboardInterrupt
            done += 1
            store(tensor, key, value)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__setitem__", counted)
            try:
                ring.append(coded(7, 6, 2))
                stores = done
            except KeyboardInterrupt:
                pass
        del ring
        ring = MappedRing.open(folder)
        whole = stop >= (stores or stop + 1)
        assert ring.count == (13 if whole else 7) and ring.size == (
            9 if whole else 7 if stop == 0 else 3
        )
        obs = ring.sample(1, ring.size).obs[:, 0, 0]
        assert obs.tolist() == list(range(ring.start, ring.count + 1))
        if stores:
            break
    assert stores > 6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_s_ring_holds_what_ram_would():
    start, env = torch.tensor([12, 15, 20]), torch.tensor([0, 2, 1])
    for codec in CODECS:
        rings = [ring_of(20, 3, codec=codec, device=device) for device in ("cpu", "cuda")]
        for ring in rings:
            for clock in (0, 12):
                # From either side
                ring.append(noise(clock, 12, 3).to(ring.device if clock else "cpu"))
        in_ram, on_device = (
            ring.read(start.to(ring.device), env.to(ring.device), 4).to("cpu") for ring in rings
        )
        assert (
            rings[1].device.type == "cuda"
            and rings[1].nbytes == rings[0].nbytes
            and same(in_ram, on_device)
        )
        assert rings[1].sample(8, 4).obs.device.type == "cuda"
