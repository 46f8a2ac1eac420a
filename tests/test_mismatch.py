"""The report on two policies' log-probabilities: its numbers, its verdict, and what it refuses."""

import io
import json
import math
import struct
import warnings
import zipfile

import dumps
import numpy as np
import pytest
import torch

from fp8rl import doctor_command as doctor
from fp8rl.bits import mismatch
from fp8rl.bits.acting_mismatch import MEANING

LEARNER = np.log([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]])
ACTOR = np.log([[0.4, 0.25, 0.9], [0.35, 0.4, 0.2]])
RATIO = np.array([[1.25, 0.8, 1.0], [6 / 7, 1.5, 0.5]])


def policy_logp(sequences: int = 64, tokens: int = 100, seed: int = 0) -> np.ndarray:
    """Log-probabilities as of sampled tokens, some certain and some not."""
    draw = np.random.default_rng(seed)
    return -draw.exponential(1.0, (sequences, tokens))


def noisy(logp: np.ndarray, size: float = 0.02, seed: int = 1) -> np.ndarray:
    """The same with errors as rounding makes them: small where the policy is certain."""
    draw = np.random.default_rng(seed)
    uncertain = -np.expm1(logp)
    return np.minimum(logp + size * uncertain * draw.normal(size=logp.shape), 0.0)


def kish(weights: np.ndarray) -> float:
    return weights.sum() ** 2 / (weights.size * np.square(weights).sum())


def test_each_number_is_that_of_its_formula():
    report = mismatch(LEARNER, ACTOR)
    log_ratio = np.log(RATIO)
    assert (report.sequences, report.tokens, report.mean_length) == (2, 6, 3)
    assert report.token_sample_size == pytest.approx(kish(RATIO))
    assert report.sequence_sample_size == pytest.approx(kish(RATIO.prod(1)))
    p = 1 / (1 + np.square(RATIO - 1).mean())
    assert report.p == pytest.approx(p)
    assert report.horizon == pytest.approx(math.log(0.9) / math.log(p))
    assert report.horizons == pytest.approx(3 / report.horizon)
    assert p**report.horizon == pytest.approx(0.9)
    assert report.kl_k1 == pytest.approx(-log_ratio.mean())
    assert report.kl_k3 == pytest.approx((RATIO - 1 - log_ratio).mean())
    assert report.mean_ratio == pytest.approx(RATIO.mean())
    by_sequence = (RATIO - RATIO.mean()).sum(1)
    assert report.mean_ratio_error == pytest.approx(np.sqrt(np.square(by_sequence).sum()) / 6)
    assert (report.smallest_ratio, report.largest_ratio) == pytest.approx((0.5, 1.5))
    assert report.verdict == "not judged" and "at least 256" in str(report)


def test_a_mask_leaves_tokens_out_whatever_they_are():
    mask = np.array([[1, 1, 0], [0, 1, 1]])
    learner = np.where(mask, LEARNER, np.nan)
    actor = np.where(mask, ACTOR, -np.inf)
    report = mismatch(learner, actor, mask)
    ratio = RATIO[mask.astype(bool)]
    assert (report.tokens, report.mean_length) == (4, 2)
    assert report.mean_ratio == pytest.approx(ratio.mean())
    assert report.sequence_sample_size == pytest.approx(kish(np.array([1.0, 0.75])))
    assert mismatch(learner, actor, mask.astype(bool)) == report
    assert mismatch(learner, actor, torch.tensor(mask)) == report
    empty = mismatch(LEARNER, ACTOR, np.array([[1, 1, 1], [0, 0, 0]]))
    assert empty.sequences == 1


def test_the_clip_drops_what_ppo_drops():
    with_none = mismatch(LEARNER, ACTOR)
    assert (with_none.clipped_above, with_none.clipped_below) == pytest.approx((2 / 6, 1 / 6))
    assert math.isnan(with_none.clipped) and "above 1.2" in str(with_none)
    by_sequence = mismatch(LEARNER, ACTOR, advantages=[1.0, -1.0])
    # 1.25 of the good sequence, 0.5 of the bad one
    assert (by_sequence.clipped_above, by_sequence.clipped_below) == pytest.approx((1 / 3, 1 / 3))
    assert by_sequence.clipped == pytest.approx(2 / 6)
    by_token = mismatch(LEARNER, ACTOR, advantages=[[-1.0, 0, 0], [0, 1, 0]])
    assert (by_token.clipped_above, by_token.clipped_below) == (1.0, 0.0)
    wide = mismatch(LEARNER, ACTOR, clip=0.45)
    assert (wide.clipped_above, wide.clipped_below) == pytest.approx((1 / 6, 1 / 6))


def test_the_horizon_is_exact_for_tiny_gaps_and_infinite_for_none():
    logp = policy_logp()
    learner = np.minimum(noisy(logp, 1e-9), 0)
    report = mismatch(learner, logp)
    spread = np.square(learner - logp).mean()
    assert report.horizon == pytest.approx(-math.log(0.9) / spread, rel=1e-4)
    same = mismatch(logp, logp)
    assert (same.verdict, same.horizon, same.horizons) == ("exact", math.inf, 0)
    assert str(same).startswith("exact: ")
    assert json.loads(same.to_json())["horizon"] is None


def test_any_floating_point_type_of_either_library_will_do():
    logp = policy_logp().astype(np.float32)
    learner = noisy(logp).astype(np.float32)
    reports = [
        mismatch(learner, logp),
        mismatch(torch.tensor(learner, requires_grad=True), torch.tensor(logp)),
        mismatch(learner.astype(np.float64), torch.tensor(logp).double()),
    ]
    assert reports[0] == reports[1] == reports[2] and not reports[0].notes
    assert reports[0].verdict == "rounding"
    for half in (torch.float16, torch.bfloat16):
        report = mismatch(torch.tensor(learner).to(half), torch.tensor(logp).to(half))
        (note,) = report.notes
        assert "steps of" in note and "lower bound" in note and note in str(report)
    assert (
        "steps of 0.0078" in mismatch(learner.astype(np.float16), logp.astype(np.float16)).notes[0]
    )


def test_numbers_that_are_huge_are_reported_without_an_error():
    logp = policy_logp()
    learner = logp.copy()
    actor = logp.copy()
    learner[0, 0] = -9999.0
    actor[1, 0] = -9999.0
    with np.errstate(all="raise", under="ignore"):
        report = mismatch(learner, actor)
    assert report.smallest_ratio == 0 and report.largest_ratio > 1e20
    json.loads(report.to_json())
    str(report)


def test_one_sequence_works_and_says_what_it_lacks():
    logp = policy_logp(1, 1000)
    report = mismatch(noisy(logp), logp)
    assert math.isnan(report.sequence_sample_size) and report.verdict == "rounding"
    assert "of one sequence" in str(report)
    few = mismatch(noisy(logp.reshape(4, 250)), logp.reshape(4, 250))
    assert "with 16 sequences" in str(few)


# The verdict


def kind_of(learner, actor, **options) -> str:
    report = mismatch(learner, actor, **options)
    if report.verdict == "bug":
        assert MEANING[report.kind] in str(report)
    return report.kind


def test_rounding_is_called_rounding_with_as_many_bits():
    logp = policy_logp(128)
    bits = []
    for size in (0.2, 0.1, 0.05):
        report = mismatch(noisy(logp, size), logp)
        assert report.verdict == "rounding"
        bits.append(report.bits)
    assert np.diff(bits) == pytest.approx([1, 1], abs=0.15)


def test_each_planted_bug_is_named():
    logp = policy_logp(128)
    learner = noisy(logp)
    assert kind_of(np.roll(learner, 1, 1), logp) == "shift"
    assert kind_of(np.roll(learner, -1, 1), logp) == "shift"
    assert kind_of(0.8 * learner, logp) == "temperature"
    assert kind_of(learner - 0.05, logp) == "truncation"
    wide = noisy(logp, 0.4)
    rows = np.arange(128)[:, None]
    place = np.arange(100)[None]
    assert kind_of(np.where(rows % 3 == 0, wide, learner), logp) == "padding"
    assert kind_of(np.where(place >= 30, wide, learner), logp) == "template"
    assert kind_of(np.where(place < 10, wide, learner), logp) == "beginning"
    other = policy_logp(128, seed=5)
    assert kind_of(other, logp) == "other"
    advantages = np.random.default_rng(3).normal(size=128)
    pushed = np.minimum(learner + 0.004 * advantages[:, None] * -np.expm1(logp), 0.0)
    assert kind_of(pushed, logp, advantages=advantages) == "stale"
    assert kind_of(pushed, logp) == ""
    assert kind_of(pushed, logp, advantages=-advantages) == ""


def test_a_verdict_is_of_the_tokens_that_count_wherever_they_are():
    """Answers after prompts of different lengths, and some sequences that do not count."""
    logp = policy_logp(128)
    advantages = np.random.default_rng(3).normal(size=(128, 100))
    gaps = [noisy(logp), np.where(np.arange(100) < 10, noisy(logp, 0.4), noisy(logp))]
    start = np.random.default_rng(2).integers(0, 50, (128, 1))
    place = start + np.arange(100)
    mask = np.zeros((128, 160), bool)
    np.put_along_axis(mask, place, True, 1)
    mask[:5] = False
    for learner in gaps:
        spread = [np.full(mask.shape, np.nan) for _ in range(3)]
        for wide, x in zip(spread, (learner, logp, advantages), strict=True):
            np.put_along_axis(wide, place, x, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = mismatch(spread[0], spread[1], mask, spread[2])
        expected = mismatch(learner[5:], logp[5:], None, advantages[5:])
        assert (report.verdict, report.kind) == (expected.verdict, expected.kind)
        for name in ("tokens", "sequence_sample_size", "horizons", "mean_ratio_error", "clipped"):
            assert getattr(report, name) == pytest.approx(getattr(expected, name)), name
        for found, own in zip(report.symptoms, expected.symptoms, strict=True):
            assert found.kind == own.kind and found.value == pytest.approx(own.value)


def test_gaps_without_any_spread_are_judged_without_a_warning():
    logp = policy_logp(32)
    even = np.full_like(logp, -1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind_of(even - 0.25, even) == "truncation"
        assert kind_of(even, logp) == "other"
        assert kind_of(noisy(even, 0.02), even) == ""
        mismatch(noisy(logp), even, advantages=np.ones(32))
        mismatch(noisy(logp[:1]), logp[:1], advantages=np.ones(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gaps_below_the_step_of_a_file_are_no_bug(dtype):
    """Most log ratios are then 0, and those of some sequences are 0 for many tokens."""
    logp = torch.tensor(policy_logp(64, 200)) ** 3 / 10
    learner = torch.tensor(noisy(logp.numpy(), 0.001))
    assert kind_of(learner.to(dtype), logp.to(dtype)) == ""
    logp = torch.tensor(policy_logp(64, 200))
    wide = torch.tensor(noisy(logp.numpy(), 0.4))
    rows = torch.arange(64)[:, None]
    padded = torch.where(rows % 3 == 0, wide, logp)
    assert kind_of(padded.to(dtype), logp.to(dtype)) == "padding"


def test_tokens_that_are_certain_to_both_policies_are_no_sign_of_anything():
    draw = np.random.default_rng(0)
    logp = np.where(draw.random((64, 200)) < 0.6, 0.0, policy_logp(64, 200))
    assert kind_of(noisy(logp), logp) == ""


def test_the_mean_ratio_of_one_sequence_is_judged_by_its_own_noise():
    called = []
    for seed in range(50):
        logp = policy_logp(1, 300, seed)
        called.append(kind_of(noisy(logp, 0.1, seed + 100), logp))
    assert called == [""] * 50


together = pytest.mark.xdist_group("judged")  # once


@pytest.fixture(scope="module")
def all_judged():
    """Dumps of one shape, two policies, judged."""
    shape = dumps.Shape("recurrent", 16, 12)
    return [dumps.Judged.of(dump) for dump in dumps.DumpMaker(shape, range(70, 72), False).dumps()]


@together
def test_dumps_of_policies_are_told_from_rounding(all_judged):
    rounding = [judged for judged in all_judged if not judged.dump.bug]
    assert sum(judged.kind != "" for judged in rounding) <= len(rounding) / 10
    for (bug,), group in dumps.grouped(all_judged, "bug").items():
        if bug not in ("", "stale"):
            assert all(judged.kind for judged in group), bug
            assert sum(judged.is_named for judged in group) >= 0.8 * len(group), bug


@together
def test_the_tables_have_a_line_for_each_bug_and_rounding(all_judged):
    text = dumps.tables(all_judged)
    for bug in dumps.NAMES:
        assert f"| {bug}, " in text
    assert "| all | 30 |" in text and "| fp16 of weights and state and logits | 2 |" in text


# What is refused


def with_entry(array: np.ndarray, value: float, place=(1, 2)) -> np.ndarray:
    changed = np.array(array)
    changed[place] = value
    return changed


WRONG = {
    "learner_logp has the shape (2, 2) and actor_logp (2, 3): give log-probabilities of": (
        (LEARNER[:, :2], ACTOR),
        {},
    ),
    "learner_logp has the shape (3,): give [sequences, tokens], one sequence as [1, tokens]": (
        (LEARNER[0], ACTOR[0]),
        {},
    ),
    "learner_logp has the shape (1, 2, 3): give [sequences, tokens]": (
        (LEARNER[None], ACTOR[None]),
        {},
    ),
    "actor_logp has the shape (0, 3): give at least one token": ((LEARNER[:0], ACTOR[:0]), {}),
    "actor_logp is -inf at [1, 2]: the token was sampled": (
        (LEARNER, with_entry(ACTOR, -np.inf)),
        {},
    ),
    "learner_logp is nan at [0, 1]: mask it": ((with_entry(LEARNER, np.nan, (0, 1)), ACTOR), {}),
    "learner_logp is 0.001 at [1, 2]: give logarithms of probabilities, which are at most 0": (
        (with_entry(LEARNER, 0.001), ACTOR),
        {},
    ),
    "actor_logp is -1e+09 at [1, 2]: mask fillers": ((LEARNER, with_entry(ACTOR, -1e9)), {}),
    "actor_logp is int64: give floating point": ((LEARNER, np.zeros((2, 3), np.int64)), {}),
    "learner_logp is torch.int32: give floating point": (
        (torch.zeros(2, 3, dtype=torch.int32), ACTOR),
        {},
    ),
    "learner_logp is object: give floating point": ((np.full((2, 3), None), ACTOR), {}),
    "mask is False everywhere: give at least one token": (
        (LEARNER, ACTOR, np.zeros((2, 3), bool)),
        {},
    ),
    "mask has the shape (3,): give that of the tokens, (2, 3)": (
        (LEARNER, ACTOR, np.ones(3, bool)),
        {},
    ),
    "mask is float64: give booleans": ((LEARNER, ACTOR, np.ones((2, 3))), {}),
    "mask is 2 at [1, 2]: give booleans": (
        (LEARNER, ACTOR, with_entry(np.ones((2, 3), int), 2)),
        {},
    ),
    "advantages has the shape (3,): give (2,), one for each sequence, or (2, 3)": (
        (LEARNER, ACTOR),
        {"advantages": np.ones(3)},
    ),
    "advantages is nan at [1]: give finite numbers": (
        (LEARNER, ACTOR),
        {"advantages": [1.0, np.nan]},
    ),
    "advantages is inf at [1, 2]: give finite numbers": (
        (LEARNER, ACTOR),
        {"advantages": with_entry(np.ones((2, 3)), np.inf)},
    ),
    "clip is 0: use a number above 0 and below 1": ((LEARNER, ACTOR), {"clip": 0}),
    "clip is 1.5: use a number": ((LEARNER, ACTOR), {"clip": 1.5}),
    "clip is nan: use a number": ((LEARNER, ACTOR), {"clip": math.nan}),
    "clip is '0.2': use a number": ((LEARNER, ACTOR), {"clip": "0.2"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_log_probabilities_is_refused_in_one_line(message):
    arrays, options = WRONG[message]
    with pytest.raises(ValueError) as caught:
        mismatch(*arrays, **options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_rounding_may_put_a_log_probability_a_little_above_zero():
    mismatch(with_entry(LEARNER, 5e-6), ACTOR)
    half = with_entry(LEARNER, 5e-4).astype(np.float16)
    mismatch(half, ACTOR)
    mismatch(torch.tensor(half).bfloat16(), ACTOR)


# The command


@pytest.fixture
def run(capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            doctor.main(["mismatch", *map(str, arguments)])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


def test_the_command_prints_the_report_of_a_file(tmp_path, run):
    logp = policy_logp().astype(np.float32)
    arrays = {
        "learner_logp": np.asfortranarray(noisy(logp).astype(np.float32)),
        "actor_logp": logp,
        "mask": np.arange(100) < np.arange(20, 84)[:, None],
        "advantages": np.random.default_rng(4).normal(size=64),
    }
    expected = mismatch(**arrays, clip=0.1)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "dump.npz", **arrays)
        path = tmp_path / f"{save.__name__}.json"
        code, out, err = run(tmp_path / "dump.npz", "--clip", 0.1, "--json", path)
        assert (code, out, err) == (0, f"{expected}\n", "")
        assert path.read_text() == expected.to_json()
    code, _, err = run(tmp_path / "dump.npz", "--json", path)
    assert code == 2 and err.endswith("which exists: name a new file\n")


def forged(header: str, content: bytes = b"") -> bytes:
    """An array's file with any header."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def archive_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def saved(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


HUGE = forged("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}")
LONGER = forged("{'descr': '<f4', 'fortran_order': False, 'shape': (100, 100)}", b"\0" * 16)
NEGATIVE = forged("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}", b"\0" * 16)
CODE = forged("__import__('os').abort()")
GOOD = saved(learner_logp=LEARNER, actor_logp=ACTOR)
FILES = {
    "no actor_logp": saved(learner_logp=LEARNER),
    "has 'logp'": saved(learner_logp=LEARNER, actor_logp=ACTOR, logp=ACTOR),
    "holds object": saved(learner_logp=np.full((2, 3), None), actor_logp=ACTOR),
    "holds complex128": saved(learner_logp=LEARNER + 0j, actor_logp=ACTOR),
    "fewer sequences are enough": archive_of(learner_logp=HUGE, actor_logp=HUGE),
    "in its header, but other data": archive_of(learner_logp=LONGER, actor_logp=LONGER),
    "shape (-1, -4)": archive_of(learner_logp=NEGATIVE, actor_logp=NEGATIVE),
    "no NumPy header": archive_of(learner_logp=CODE, actor_logp=CODE),
    "not a complete .npz file": GOOD[:-40],
    "which is not a complete": b"text",
    "actor_logp is -inf at [1, 2]": saved(
        learner_logp=LEARNER, actor_logp=with_entry(ACTOR, -np.inf)
    ),
    "mask is float64": saved(learner_logp=LEARNER, actor_logp=ACTOR, mask=np.ones((2, 3))),
}


@pytest.mark.parametrize("words", FILES)
def test_a_file_of_a_stranger_is_refused_in_one_line(words, tmp_path, run):
    path = tmp_path / "dump.npz"
    path.write_bytes(FILES[words])
    code, out, err = run(path)
    assert (code, out) == (2, "") and words in err
    assert err.startswith("fp8rl.doctor: ") and err.count("\n") == 1


def test_no_byte_that_is_changed_makes_a_traceback(tmp_path, run):
    draw = np.random.default_rng(0)
    path = tmp_path / "dump.npz"
    for _ in range(200):
        content = bytearray(GOOD)
        content[draw.integers(len(content))] = draw.integers(256)
        path.write_bytes(content)
        code, _, err = run(path)
        assert code == 0 or (code == 2 and err.count("\n") == 1), err


def test_a_missing_file_a_folder_and_a_wrong_clip(tmp_path, run):
    path = tmp_path / "dump.npz"
    path.write_bytes(GOOD)
    for arguments in ((tmp_path / "none.npz",), (tmp_path,), (path, "--clip", 2)):
        code, _, err = run(*arguments)
        assert code == 2 and err.startswith("fp8rl.doctor: ") and err.count("\n") == 1
