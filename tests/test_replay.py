import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl import replay
from fp8rl.codec import CODECS
from fp8rl.losses import DUMMY, Rollout
from fp8rl.replay import LAYOUTS, ReplayBuffer, ring_bytes

WIDE = (1000.0, 10.0)  # bounds that times and environments stay in


def number_of(obs: torch.Tensor) -> torch.Tensor:
    """The number, unique among up to 4 environments, of each row but the last."""
    return 4 * obs[:-1, :, 0] + obs[:-1, :, 1]


def coded(start: int, length: int, num_envs: int) -> Rollout:
    """A rollout whose numbers tell their time and environment: obs (time, env), reward 4 time + env, and so on."""
    time = torch.arange(start, start + length + 1).float().unsqueeze(-1).expand(-1, num_envs)
    env = torch.arange(num_envs).float().expand(length + 1, -1)
    obs = torch.stack((time, env), dim=-1)
    row = number_of(obs)
    return Rollout(obs, (row % 7).long(), row.clone(), (row % 5).to(torch.uint8), -row)


def noise(start: int, length: int, num_envs: int, features: int = 2) -> Rollout:
    """A rollout of random numbers that goes on from one of the same seed sequence: observation t depends on t alone."""
    rows = [torch.Generator().manual_seed(t) for t in range(start, start + length + 1)]
    obs = torch.stack([2 * torch.rand(num_envs, features, generator=g) - 1 for g in rows])
    return Rollout(obs, torch.zeros(length, num_envs).long(), obs[1:, :, 0], torch.zeros(length, num_envs).byte(), obs[1:, :, 1])


def same(one: Rollout, other: Rollout) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one[:5], other[:5], strict=True))


@given(
    rows=st.integers(2, 20),
    num_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=8),
    length=st.integers(1, 19),
    seed=st.integers(0, 1000),
    layout=st.sampled_from(["compact", "full"]),
)
def test_slices_are_what_happened_and_never_cross_the_head(rows, num_envs, lengths, length, seed, layout):
    ring, clock = ReplayBuffer(rows, num_envs, WIDE, layout=layout), 0
    for n in (min(n, rows - 1) for n in lengths):
        ring.append(coded(clock, n, num_envs))
        clock += n
    remembered = min(clock, rows - 1)
    length = min(length, remembered)
    batch = ring.sample(50, length, torch.Generator().manual_seed(seed))
    time, env = batch.obs.unbind(-1)
    assert (time[1:] == time[:-1] + 1).all() and (env == env[0]).all()  # one environment, one step after the other
    assert time.min() >= clock - remembered and time.max() <= clock
    happened = number_of(batch.obs)
    assert torch.equal(batch.reward, happened) and torch.equal(batch.behavior_logp, -happened)
    assert torch.equal(batch.action, (happened % 7).long()) and torch.equal(batch.flags, (happened % 5).to(torch.uint8))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    layout=st.sampled_from(LAYOUTS),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 1000),
)
def test_every_layout_and_codec_gives_the_plain_ones_slices(lengths, layout, codec, seed):
    plain, ring, clock = ReplayBuffer(10, 2, layout="full"), ReplayBuffer(10, 2, layout=layout, codec=codec), 0
    for n in lengths:
        plain.append(noise(clock, n, 2))
        ring.append(noise(clock, n, 2))
        clock += n
    length = min(3, plain.size)
    ours = ring.sample(20, length, torch.Generator().manual_seed(seed))
    theirs = plain.sample(20, length, torch.Generator().manual_seed(seed))
    assert same(ours._replace(obs=theirs.obs), theirs)
    half_step = torch.tensor(
        {"fp32": (0, 0), "fp16": (2**-12,) * 2, "bf16": (2**-9,) * 2, "int8": (4 / 254, 1.9 / 254)}.get(codec, (2**-5,) * 2)
    )
    error = (ours.obs - theirs.obs).abs()
    assert (error[:-1] <= half_step + 1e-7).all()
    if layout != "delta":
        assert (error[-1] <= half_step + 1e-7).all()
    elif codec == "fp32":
        assert (error[-1] <= 2**-11).all()  # of a difference below 2
    else:
        assert (error[-1] <= 2**-4 * 2).all()


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_starts_are_uniform_over_all_valid_ones(length, layout):
    ring = ReplayBuffer(11, 3, WIDE, layout=layout)
    for start in (0, 9, 18):  # wraps around twice
        ring.append(coded(start, 9, 3))
    starts, draws = (10 - length + 1) * 3, 30_000
    time, env = ring.sample(draws, length, torch.Generator().manual_seed(0)).obs[0].unbind(-1)
    counts = np.bincount(((time - 17) * 3 + env).long(), minlength=starts)
    assert len(counts) == starts
    statistic = ((counts - draws / starts) ** 2 / (draws / starts)).sum()
    freedom = starts - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # mean and four standard deviations of chi-square


# Bytes of an observation and of what `delta` stores beside it, a feature.
WIDTHS = {"fp32": (4, 2), "fp16": (2, 1), "bf16": (2, 1), "int8": (1, 1), "fp8": (1, 1)}


@pytest.mark.parametrize("features", [2, 64])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("storage", ["ram", "memmap"])
def test_predicted_bytes_are_the_measured_ones(tmp_path, layout, codec, storage, features):
    ring = ReplayBuffer(
        25, 16, [1.0] * features, layout=layout, codec=codec, memmap=tmp_path / "ring" if storage == "memmap" else None
    )
    own, delta = WIDTHS[codec]
    by_hand = 25 * 16 * (features * {"compact": own, "full": 2 * own, "delta": own + delta}[layout] + 10)
    assert ring_bytes(25, 16, features, layout, codec) == ring.nbytes == by_hand
    ring.append(noise(0, 24, 16, features))
    assert ring.nbytes == by_hand and ring.filled_bytes == (by_hand if storage == "ram" else 0)


def test_the_promised_sizes():
    assert ring_bytes(1, 1) == 18 and ring_bytes(1, 1, codec="int8") == ring_bytes(1, 1, codec="fp8") == 12
    assert 7 * ring_bytes(1, 1, 64, "compact", "int8") <= ring_bytes(1, 1, 64, "full", "fp32")


def test_sample_gives_what_the_loss_takes():
    ring = ReplayBuffer(10, 2)
    ring.append(coded(0, 5, 2))
    batch = ring.sample(8, 3)
    assert [tuple(x.shape) for x in batch[:5]] == [(4, 8, 2), (3, 8), (3, 8), (3, 8), (3, 8)]
    assert [x.dtype for x in batch[:5]] == [torch.float32, torch.int64, torch.float32, torch.uint8, torch.float32]
    assert batch.state is None


def test_touching_cache_lines_first_changes_nothing(monkeypatch):
    ring = ReplayBuffer(100, 3, WIDE)
    ring.append(coded(0, 90, 3))
    plain = ring.sample(50, 20, torch.Generator().manual_seed(0))
    monkeypatch.setattr(replay, "CACHE", 0)
    assert same(ring.sample(50, 20, torch.Generator().manual_seed(0)), plain)


def test_samples_are_copies():
    ring = ReplayBuffer(10, 2)
    ring.append(coded(0, 5, 2))
    before = ring.fields["reward"].clone()
    ring.sample(8, 3).reward.fill_(99)
    assert torch.equal(ring.fields["reward"], before)


def test_a_seam_is_a_dummy_row_between_two_sources():
    for layout in LAYOUTS:
        ring = ReplayBuffer(20, 2, WIDE, layout=layout)
        ring.append(coded(0, 5, 2))
        ring.append(coded(100, 5, 2), seam=True)
        assert ring.size == 11
        batch = ring.sample(1, 11)
        assert batch.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]
        assert batch.flags[5, 0] == DUMMY and batch.reward[5, 0] == 0


def test_refusals():
    with pytest.raises(ValueError, match="rows is 1"):
        ReplayBuffer(1, 2)
    for bad in ({"layout": "loose"}, {"codec": "fp4"}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} is '{next(iter(bad.values()))}': choose from"):
            ReplayBuffer(10, 2, **bad)
    with pytest.raises(MemoryError, match=r"replay needs 18,000,000,000,000 bytes and cpu has [\d,]+ free: lower capacity"):
        ReplayBuffer(10**12, 1)
    for codec in ("int8", "fp8"):
        with pytest.raises(ValueError, match=rf"codec is '{codec}' and feature 1 has bounds \[-inf, inf\]: give finite ones"):
            ReplayBuffer(10, 2, (1.0, torch.inf), codec=codec)
    ring = ReplayBuffer(10, 2)
    with pytest.raises(ValueError, match="rollout of 10 rows"):
        ring.append(coded(0, 10, 2))
    ring.append(coded(0, 4, 2))
    with pytest.raises(ValueError, match="slice length is 5 but only 4 rows are stored"):
        ring.sample(1, 5)
    for slices, length in ((0, 1), (1, 0), (-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"slices is {slices} and length {length}: give at least 1 of each"):
            ring.sample(slices, length)
    with pytest.raises(ValueError, match="num_envs is 0: give at least 1"):
        ReplayBuffer(10, 0)
    with pytest.raises(ValueError, match="layout is 'delta' and codec 'bf16', which needs finite bounds: choose compact"):
        ReplayBuffer(10, 2, (1.0, torch.inf), layout="delta", codec="bf16")


def poisoned(name: str) -> Rollout:
    rollout = coded(8, 4, 2)
    getattr(rollout, name)[(2, 1, 1) if name == "obs" else (2, 1)] = torch.nan
    return rollout


@pytest.mark.parametrize(
    "rollout, message",
    [
        (coded(8, 4, 1), r"obs has shape \[5, 1, 2\]: this ring takes \[5, 2, 2\]"),
        (coded(8, 4, 3), r"obs has shape \[5, 3, 2\]: this ring takes \[5, 2, 2\]"),
        (noise(8, 4, 2, 3), r"obs has shape \[5, 2, 3\]: this ring takes \[5, 2, 2\]"),
        (coded(8, 4, 2)._replace(obs=torch.zeros(4, 2, 2)), r"obs has shape \[4, 2, 2\]: this ring takes \[5, 2, 2\]"),
        (coded(8, 4, 2)._replace(reward=torch.zeros(3, 2)), r"reward has shape \[3, 2\]: this ring takes \[4, 2\]"),
        (coded(8, 4, 2)._replace(action=torch.full((4, 2), 300)), "action is outside 0 to 255"),
        (coded(8, 4, 2)._replace(action=torch.full((4, 2), -1)), "action is outside 0 to 255"),
        (poisoned("obs"), "obs is NaN in feature 1: mend the environment"),
        (poisoned("reward"), "reward is NaN: mend its source"),
        (poisoned("behavior_logp"), "behavior_logp is NaN: mend its source"),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused_and_leaves_the_ring_as_it_was(rollout, message):
    ring = ReplayBuffer(10, 2, WIDE)
    ring.append(coded(0, 8, 2))
    before = ring.sample(1, 8, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=message):
        ring.append(rollout)
    assert ring.size == 8 and same(ring.sample(1, 8, torch.Generator().manual_seed(0)), before)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "fp8"])
def test_values_out_of_range_are_counted_and_clipped(codec):
    ring = ReplayBuffer(10, 1, (4.0, 2.0), codec=codec)
    rollout = noise(0, 4, 1)
    far = {"fp16": 1e5, "bf16": 3.4e38}.get(codec, 10)
    rollout.obs[1, 0, 1], rollout.obs[2, 0, 1] = far, -far
    rollout.obs[0, 0, 0] = rollout.obs[4, 0, 0] = far
    ring.append(rollout)
    assert ring.clipped.tolist() == [2, 2]
    ring.append(rollout._replace(obs=torch.cat((rollout.obs[4:], rollout.obs[1:4].clamp(-1, 1), rollout.obs[1:2].clamp(-1, 1)))))
    assert ring.clipped.tolist() == [2, 2]  # the observation between two rollouts counts once
    largest = {"int8": 2.0, "fp8": 448 * 2**-7, "fp16": 65504, "bf16": torch.finfo(torch.bfloat16).max}[codec]
    obs = ring.sample(1, 8).obs[:, 0, 1]
    assert obs[1] == pytest.approx(largest, rel=1e-6) and obs[2] == pytest.approx(-largest, rel=1e-6)


# In a folder


def folder_of(tmp_path, **kind) -> tuple:
    ring = ReplayBuffer(10, 2, WIDE, memmap=tmp_path / "ring", **kind)
    ring.append(coded(0, 7, 2))
    ring.append(coded(7, 7, 2))
    return tmp_path / "ring", ring


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_folder_holds_what_ram_would(tmp_path, layout, codec):
    rings = [ReplayBuffer(10, 2, layout=layout, codec=codec, memmap=memmap) for memmap in (None, tmp_path / "ring")]
    for start in (0, 7, 14):
        for ring in rings:
            ring.append(noise(start, 7, 2))
    in_ram, mapped = (ring.sample(30, 4, torch.Generator().manual_seed(0)) for ring in rings)
    assert same(in_ram, mapped)
    rings[1].close()
    again = ReplayBuffer.open(tmp_path / "ring")
    assert same(in_ram, again.sample(30, 4, torch.Generator().manual_seed(0)))
    assert (again.layout, again.codec.name) == (layout, codec)


def test_reopened_to_read_it_never_changes(tmp_path):
    folder, ring = folder_of(tmp_path)
    del ring
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    reader, other = ReplayBuffer.open(folder), ReplayBuffer.open(folder)
    with pytest.raises(ValueError, match="opened to read"):
        reader.append(coded(14, 3, 2))
    reader.fields["reward"].fill_(99)  # a private copy
    assert other.sample(5, 3).reward.max() < 99
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("how", ["open", "same settings"])
def test_reopened_to_go_on_it_puts_a_seam(tmp_path, how):
    folder, ring = folder_of(tmp_path)
    del ring
    ring = ReplayBuffer.open(folder, writable=True) if how == "open" else ReplayBuffer(10, 2, WIDE, memmap=folder)
    ring.append(coded(500, 3, 2))
    assert ring.sample(1, 9).obs[:, 0, 0].tolist() == [9, 10, 11, 12, 13, 14, 500, 501, 502, 503]


def test_a_folder_has_one_writer(tmp_path):
    folder, ring = folder_of(tmp_path)
    for writable in (True, False):
        with pytest.raises(OSError, match="another ring is using"):
            ReplayBuffer.open(folder, writable)
    del ring
    ReplayBuffer.open(folder, writable=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(folder, **changes):
    about = json.loads((folder / "ring.json").read_text())
    (folder / "ring.json").write_text(json.dumps(about | changes))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: cut(folder / "obs.bin"), "obs.bin has 159 bytes of 160"),
        (lambda folder: (folder / "reward.bin").unlink(), "reward.bin has 0 bytes of 80"),
        (lambda folder: (folder / "clock.bin").write_bytes(b"\xff" * 16), "clock.bin is damaged"),
        (lambda folder: cut(folder / "ring.json") or cut(folder / "ring.json"), "ring.json cannot be read"),
        (lambda folder: (folder / "ring.json").write_text("{}"), "not of format fp8rl-ring-1"),
        (lambda folder: edit(folder, rows="10"), "ring.json is damaged"),
        (lambda folder: edit(folder, num_envs=None), "ring.json is damaged"),
        (lambda folder: edit(folder, high=[[1.0]]), "ring.json is damaged"),
        (lambda folder: edit(folder, extra=1), "ring.json is damaged"),
        (lambda folder: edit(folder, rows=11), "obs.bin has 160 bytes of 176"),
        (lambda folder: (folder / "ring.json").unlink(), "holds no finished ring"),
        (lambda folder: shutil.rmtree(folder), "holds no finished ring"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(tmp_path, damage, message):
    folder, ring = folder_of(tmp_path)
    del ring
    damage(folder)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        ReplayBuffer.open(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("change", [{"rows": 11}, {"num_envs": 3}, {"layout": "full"}, {"codec": "int8"}, {"high": (9.0, 9.0)}])
def test_a_folder_of_another_config_is_refused(tmp_path, change):
    folder, ring = folder_of(tmp_path)
    del ring
    name = next(iter(change))
    # The lower bounds follow the upper ones and are compared first.
    with pytest.raises(ValueError, match=f"whose ring has {name.replace('high', 'low')} .* and not .*: name another folder"):
        ReplayBuffer(**{"rows": 10, "num_envs": 2, "high": WIDE, "memmap": folder} | change)
    assert ReplayBuffer.open(folder).size == 9


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        ReplayBuffer(10, 2, memmap=tmp_path / "file")
    with pytest.raises(OSError, match="holds files but no finished ring"):
        ReplayBuffer(10, 2, memmap=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes, the disk has [\d,]+ free: lower capacity"):
        ReplayBuffer(10**15, 2, memmap=tmp_path / "large")
    assert not (tmp_path / "large").exists()


def test_a_disk_that_fills_up_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"memmap is .* and cannot be used \(No space left on device\): name another folder"):
            ReplayBuffer(10, 2, memmap=tmp_path / "ring")
    ReplayBuffer(10, 2, memmap=tmp_path / "ring")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"cannot be used \(Permission denied\): name another folder"):
        ReplayBuffer(10, 2, memmap=tmp_path / "ring")


def test_a_refused_permission_is_said_in_one_line(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(replay.MappedFolder, "_lock", refuse)
    with pytest.raises(OSError, match=r"memmap is .* and cannot be used \(Permission denied\): name another folder"):
        ReplayBuffer(10, 2, memmap=tmp_path / "ring")


WRITER = """
    import sys, torch
    from fp8rl.losses import Rollout
    from fp8rl.replay import ReplayBuffer
    ring, t = ReplayBuffer(50, 4, (1e9,), memmap=sys.argv[1], layout=sys.argv[2]), 0
    print("ready", flush=True)
    while True:
        n = 1 + t % 40
        time = torch.arange(t, t + n + 1.0).view(-1, 1).expand(-1, 4)
        zero = torch.zeros(n, 4)
        ring.append(Rollout(time.unsqueeze(-1).contiguous(), zero.long(), time[:-1], zero.byte(), -time[:-1]))
        t += n
"""


@pytest.mark.parametrize("layout", ["compact", "full"])
def test_a_killed_writer_leaves_whole_rows(tmp_path, layout):
    delays = np.random.default_rng(0).uniform(0, 0.05, 1)
    for i, delay in enumerate(delays):
        folder = tmp_path / str(i)
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), layout]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay)
            process.send_signal(signal.SIGKILL)
        ring = ReplayBuffer.open(folder)
        if ring.size:
            batch = ring.sample(1, ring.size)
            time = batch.obs[:, 0, 0]
            assert (time[1:] == time[:-1] + 1).all() and time[-1] == ring.count
            assert torch.equal(batch.reward[:, 0], time[:-1]) and torch.equal(batch.behavior_logp[:, 0], -time[:-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_append_cut_short_gives_up_only_what_it_was_overwriting(tmp_path, layout, monkeypatch):
    """The slow twin of the kill: stop after each single store."""
    stores = 0
    for stop in itertools.count():
        folder = tmp_path / str(stop)
        ring = ReplayBuffer(10, 2, WIDE, memmap=folder, layout=layout)
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
        ring = ReplayBuffer.open(folder)
        whole = stop >= (stores or stop + 1)
        assert ring.count == (13 if whole else 7) and ring.size == (9 if whole else 7 if stop == 0 else 3)
        obs = ring.sample(1, ring.size).obs[:, 0, 0]
        assert obs.tolist() == list(range(ring.start, ring.count + 1))
        if stores:
            break
    assert stores > 6


def test_settings_stand_in_the_folder_as_json(tmp_path):
    folder, _ = folder_of(tmp_path)
    about = json.loads((folder / "ring.json").read_text())
    assert about["rows"] == 10 and about["codec"] == "fp32" and about["high"] == list(WIDE)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_device_s_ring_holds_what_ram_would(layout, codec):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rings = [ReplayBuffer(20, 3, layout=layout, codec=codec, device=device) for device in ("cpu", "cuda")]
    start, env = torch.tensor([12, 15, 20]), torch.tensor([0, 2, 1])
    for ring in rings:
        for clock in (0, 12):
            ring.append(noise(clock, 12, 3).to(ring.device if clock else "cpu"))  # from either side
    in_ram, on_device = (ring._read(start.to(ring.device), env.to(ring.device), 4).to("cpu") for ring in rings)
    assert rings[1].device.type == "cuda" and rings[1].nbytes == rings[0].nbytes and same(in_ram, on_device)
    assert rings[1].sample(8, 4).obs.device.type == "cuda"
