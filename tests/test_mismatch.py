"""The report on two policies' log-probabilities: its numbers, its verdict, and what it refuses."""

import json
import math
import re
import tracemalloc
import warnings

import noise_dumps
import numpy as np
import pytest
import torch

from fp8rl.doctor import mismatch
from fp8rl.dumps import MEANING, kinds_of
from fp8rl.dumps.symptoms import Seen

LEARNER = np.log([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]])
ACTOR = np.log([[0.4, 0.25, 0.9], [0.35, 0.4, 0.2]])
RATIO = np.array([[1.25, 0.8, 1.0], [6 / 7, 1.5, 0.5]])
SHAPE = (64, 100)


def policy_logp(sequences: int = 64, tokens: int = 100, seed: int = 0) -> np.ndarray:
    """Log-probabilities as of sampled tokens, some certain and some not."""
    return -np.random.default_rng(seed).exponential(1.0, (sequences, tokens))


def noisy(logp: np.ndarray, size: float = 0.02, seed: int = 1) -> np.ndarray:
    """The same with errors as rounding makes them: small where the policy is certain."""
    draw = np.random.default_rng(seed)
    return np.minimum(logp + size * -np.expm1(logp) * draw.normal(size=logp.shape), 0.0)


def sampled(
    sequences: int = 64, length: int = 100, spread: float = 2.0, noise: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """A learner's and an actor's log-probabilities of tokens of the actor: only rounding."""
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(sequences, length, 64, generator=draw)
    tokens = logits.softmax(-1).flatten(0, 1).multinomial(1, generator=draw)
    tokens = tokens.view(sequences, length, 1)
    error = noise * torch.randn(logits.shape, generator=draw)
    learner = (logits + error).log_softmax(-1).gather(-1, tokens)[..., 0]
    return learner, logits.log_softmax(-1).gather(-1, tokens)[..., 0]


def kish(weights: np.ndarray) -> float:
    return weights.sum() ** 2 / (weights.size * np.square(weights).sum())


# Numbers


def test_each_number_is_that_of_its_formula():
    log_ratio = np.log(RATIO)
    horizon = math.log(0.9) / -math.log1p(np.square(RATIO - 1).mean())
    by_sequence = (RATIO - RATIO.mean()).sum(1)
    probs = np.exp([LEARNER.ravel(), ACTOR.ravel()])
    report = mismatch(LEARNER, ACTOR)
    expected = {
        "sequences": 2,
        "tokens": 6,
        "mean_length": 3,
        "token_sample_size": kish(RATIO),
        "sequence_sample_size": kish(RATIO.prod(1)),
        "horizon": horizon,
        "horizons": 3 / horizon,
        "kl_k1": -log_ratio.mean(),
        "kl_k3": (RATIO - 1 - log_ratio).mean(),
        "mean_ratio": RATIO.mean(),
        "mean_ratio_error": np.sqrt(np.square(by_sequence).sum()) / 6,
        "smallest_ratio": 0.5,
        "largest_ratio": 1.5,
        "token_mult_prob_error": np.exp(np.abs(log_ratio)).mean(),
        "probs_diff_mean": np.abs(probs[0] - probs[1]).mean(),
        "probs_diff_max": 0.2,
        "probs_correlation": np.corrcoef(probs)[0, 1],
        "logp_diff_mean": np.abs(log_ratio).mean(),
        "logp_diff_max": math.log(2),
        "farthest": (1, 2),
    }
    assert {name: getattr(report.numbers, name) for name in expected} == pytest.approx(expected)
    assert report.verdict == "not judged" and "at least 256" in str(report)


def test_a_mask_leaves_tokens_out_whatever_they_are():
    mask = np.array([[1, 1, 0], [0, 1, 1]])
    report = mismatch(np.where(mask, LEARNER, np.nan), np.where(mask, ACTOR, -np.inf), mask)
    assert (report.numbers.tokens, report.numbers.mean_length) == (4, 2)
    assert report.numbers.mean_ratio == pytest.approx(RATIO[mask.astype(bool)].mean())
    assert report.numbers.sequence_sample_size == pytest.approx(kish(np.array([1.0, 0.75])))
    assert mismatch(LEARNER, ACTOR, [[1, 1, 1], [0, 0, 0]]).numbers.sequences == 1


@pytest.mark.parametrize(
    ("advantages", "clip", "shares"),  # clipped above, below, and of all tokens
    [
        (None, 0.2, (2 / 6, 1 / 6, math.nan)),
        (None, 0.45, (1 / 6, 1 / 6, math.nan)),
        ([1.0, -1.0], 0.2, (1 / 3, 1 / 3, 2 / 6)),  # 1.25 of the good sequence, 0.5 of the bad one
        ([[-1.0, 0, 0], [0, 1, 0]], 0.2, (1, 0, 1 / 6)),
    ],
)
def test_the_clip_drops_what_ppo_drops(advantages, clip, shares):
    report = mismatch(LEARNER, ACTOR, advantages=advantages, clip=clip)
    found = report.numbers.clipped_above, report.numbers.clipped_below, report.numbers.clipped
    assert found == pytest.approx(shares, nan_ok=True)
    assert ("would drop" in str(report)) == (advantages is not None)


def test_the_horizon_is_exact_for_tiny_gaps_and_infinite_for_none():
    logp = policy_logp()
    learner = noisy(logp, 1e-9)
    spread = np.square(learner - logp).mean()
    assert mismatch(learner, logp).numbers.horizon == pytest.approx(
        -math.log(0.9) / spread, rel=1e-4
    )
    with np.errstate(all="raise", under="ignore"):
        same = mismatch(logp, logp)
    assert (same.verdict, same.numbers.horizon, same.numbers.horizons) == ("exact", math.inf, 0)
    assert (
        str(same).startswith("exact: ") and json.loads(same.to_json())["numbers"]["horizon"] is None
    )


@pytest.mark.parametrize("log_ratio", [-95.0, 45.0, 89.0, 5000.0])
def test_one_token_with_a_huge_log_ratio_is_named_and_its_ratio_is_the_same_everywhere(log_ratio):
    learner, actor = sampled(noise=0.02)
    mask = np.ones((64, 100))
    mask[:, :3] = 0
    learner[5, 7] = min(log_ratio, 0.0) - 0.5
    actor[5, 7] = learner[5, 7] - log_ratio
    with np.errstate(all="raise", under="ignore"):
        report = mismatch(learner, actor, mask)
    text = str(report)
    assert report.numbers.farthest == (5, 7) and "(largest, at [5, 7])" in text
    assert "100% of the squared gap is at 1 of 6,208 tokens, here and there" in text
    assert "the largest is token 7 of sequence 5" in text
    largest = np.exp(min(abs(log_ratio), 300.0))
    assert report.numbers.token_mult_prob_error == pytest.approx(largest / report.numbers.tokens)
    if log_ratio > 0:
        assert report.numbers.largest_ratio == pytest.approx(largest)
        assert report.stacks[-2].mean_weight == pytest.approx(report.numbers.mean_ratio)
    assert not re.search(r"[\d,]{14,}", f"{text} {report.stack_table()} {report.to_json()}")


def test_the_horizon_is_measured_where_ratios_go_together():
    """Each sequence's log ratios have their own mean, so products vary more than p^N says."""
    logp = policy_logp(256, 256) - 0.5
    draw = np.random.default_rng(1)
    noise = 0.02 * draw.normal(size=logp.shape)
    independent = mismatch(logp + noise, logp)
    assert independent.numbers.horizon == independent.numbers.token_horizon
    assert 0.9 < independent.numbers.horizon_low / independent.numbers.horizon < 1
    report = mismatch(logp + noise + 0.01 * draw.normal(size=(256, 1)), logp)
    # At a horizon of H tokens, 0.01 H + the noise of H tokens is about a third.
    assert report.numbers.horizon == pytest.approx(30, rel=0.3) and "go together" in str(report)
    assert report.numbers.horizon_low < report.numbers.horizon < report.numbers.horizon_high


# The verdict


def where(tokens, size: float = 0.4, logp: np.ndarray | None = None) -> tuple:
    """A gap that is larger at some tokens."""
    logp = policy_logp(128) if logp is None else logp
    return np.where(tokens, noisy(logp, size), noisy(logp)), logp


def pushed(sign: float = 1.0) -> dict:
    """A learner that has learned from the sequences' advantages."""
    logp = policy_logp(128)
    advantages = np.random.default_rng(3).normal(size=128)
    learner = noisy(logp) + 0.004 * advantages[:, None] * -np.expm1(logp)
    arrays = {"learner_logp": np.minimum(learner, 0.0), "actor_logp": logp}
    return arrays | {"advantages": sign * advantages} if sign else arrays


def sampled_by(is_swapped: bool = False, noise="2% noisy tokens", size=0.01, **options) -> tuple:
    """Tokens that were sampled at another temperature, or by top-p."""
    draw = np.random.default_rng(20_000)
    dump = noise_dumps.dump_of(SHAPE, noise, size, draw, **options)
    return (dump[1], dump[0], dump[2]) if is_swapped else dump


def biased(bias: float, *shape: int) -> tuple:
    _, actor = sampled(*shape)
    noise = 0.01 * torch.randn(actor.shape, generator=torch.Generator().manual_seed(1))
    return (actor + bias + noise).clamp(max=-1e-6), actor


def in_columns(times: float) -> tuple:
    """Answers after prompts of different lengths, with a larger gap from column 128 on."""
    draw = np.random.default_rng(0)
    logp = -draw.exponential(size=(64, 200)) - 0.5
    mask = np.arange(200) >= draw.integers(5, 90, size=(64, 1))
    factor = np.where(np.arange(200) >= 128, times, 1)
    return logp + 0.01 * draw.normal(size=logp.shape) * factor, logp, mask


def after_prompts(learner: np.ndarray, logp: np.ndarray) -> tuple:
    """128 answers of 100 tokens after prompts of different lengths; five of them do not count."""
    place = np.arange(160) - np.random.default_rng(2).integers(0, 50, (128, 1))
    mask = (place >= 0) & (place < 100)
    wide = [np.take_along_axis(x, place.clip(0, 99), 1) for x in (learner, logp)]
    mask[:5] = False
    return *(np.where(mask, x, np.nan) for x in wide), mask


def by_token(size: float = 0.03) -> dict:
    """The learner finds some of 500 tokens more likely than the actor, wherever they are."""
    draw = np.random.default_rng(7)
    tokens = draw.integers(0, 500, LOGP.shape)
    learner = noisy(LOGP) + size * draw.normal(size=500)[tokens] * -np.expm1(LOGP)
    return {"learner_logp": np.minimum(learner, 0), "actor_logp": LOGP, "tokens": tokens}


def after_holes() -> tuple:
    """The gap is larger at three tokens after some that do not count."""
    begin = np.random.default_rng(8).integers(20, 80, (64, 1))
    is_after = (begin <= PLACE) & (begin + 3 > PLACE)
    mask = (begin - 8 > PLACE) | (begin <= PLACE)
    return *where(is_after, 0.3, LOGP), mask


LOGP = policy_logp()
ROWS = np.arange(128)[:, None]
PLACE = np.arange(100)[None]
HERE_AND_THERE = np.random.default_rng(4).random((64, 100)) < 0.03
EVEN = np.full((32, 100), -1.0)
OF_CARDS = {"temperature": 0.6, "top_p": 0.95}  # of many model cards
WEAK = {"temperature": 0.9, "top_p": 0.9, "size": 0.1, "noise": "Gaussian"}
PENALIZED = noise_dumps.penalized(SHAPE, 0.01, np.random.default_rng(20_000))
CERTAIN = np.where(np.random.default_rng(0).random((64, 200)) < 0.6, 0.0, policy_logp(64, 200))
# By what is done: a dump, the kinds of bugs that are named or a verdict, and words of the report
VERDICTS = {
    "5 bits": (lambda: where(True, 0.1), "rounding or bug", "about 3."),
    "4 bits": (
        lambda: where(True, 0.2),
        "rounding or bug",
        "--precision bf16, and advantages",
    ),
    "half a bit": (lambda: sampled(noise=0.6), ["other"], "nothing says why"),
    "rolled by one": (
        lambda: (np.roll(noisy(LOGP), 1, 1), LOGP),
        ["shift"],
        "the token 1 before it",
    ),
    "other labels": (lambda: (policy_logp(128, seed=5) - 2.5, policy_logp(128)), ["shift"], "e^2."),
    "other rows": (lambda: (noisy(policy_logp())[::-1], policy_logp()), ["order"], "64 sequences"),
    "four other rows": (
        lambda: (noisy(policy_logp())[[3, 2, 1, 0, *range(4, 64)]], policy_logp()),
        ["order"],
        "4 sequences of the learner",
    ),
    "other pieces": (
        lambda: (np.roll(noisy(policy_logp(64, 128)), 32, 1), policy_logp(64, 128)),
        ["order"],
        "other pieces of their own",
    ),
    "a token is missing": (
        lambda: (
            np.where(PLACE < 30, LOGP, np.roll(LOGP, -1, 1)),
            noisy(LOGP),
            np.broadcast_to(PLACE < 99, LOGP.shape),
        ),
        ["shift"],
        "from a token on",
    ),
    "base 10": (
        lambda: (LOGP / np.log(10), noisy(LOGP)),
        ["base"],
        "logarithms of different bases",
    ),
    "by no token": (lambda: by_token(0.0), "rounding", ""),
    "half of the sequences are exact": (
        lambda: (np.where(ROWS % 2, noisy(policy_logp(128)), policy_logp(128)), policy_logp(128)),
        "rounding",
        "",
    ),
    "a heavy beginning": (
        lambda: where(PLACE < 3, 1.5, policy_logp(128) - 4.0),
        ["beginning"],
        "at the first tokens",
    ),
    "by token, of int8 weights": (lambda: {**by_token(), "precision": "int8"}, "rounding", ""),
    "by token": (by_token, ["weights"], "which token of the vocabulary it is"),
    "after holes": (after_holes, ["template"], "right after tokens that do not count"),
    "0.8": (lambda: (0.8 * sampled()[1], sampled()[1]), ["temperature"], "does not divide"),
    "lower": (lambda: (where(False)[0] - 0.05, policy_logp(128)), ["truncation"], "0.95"),
    "a third": (lambda: where(ROWS % 3 == 0), ["padding"], "are those of sequences"),
    "from 30 on": (lambda: where(PLACE >= 30), ["template"], "from token 30 on"),
    "the first 10": (lambda: where(PLACE < 10), ["beginning"], "at the first tokens"),
    "the first 10 after prompts": (
        lambda: after_prompts(*where(PLACE < 10)),
        ["beginning"],
        "at the first tokens",
    ),
    "another policy": (
        lambda: (policy_logp(128, seed=5), policy_logp(128)),
        ["other"],
        "nothing says why",
    ),
    "learned": (pushed, ["stale"], "favours what turned out well"),
    "learned the contrary": (lambda: pushed(-1.0), "rounding", ""),
    "learned, unknown": (lambda: pushed(0.0), "rounding", "give advantages"),
    "even": (lambda: (EVEN - 0.25, EVEN), ["truncation"], ""),
    "even, and noise": (lambda: (noisy(EVEN), EVEN), "rounding", ""),
    "an even learner": (lambda: (EVEN, policy_logp(32)), ["other"], ""),
    "below the file's step": (
        lambda: [torch.tensor(x).bfloat16() for x in where(True, 0.001)],
        "rounding",
        "lower bound",
    ),
    "certain tokens": (lambda: (noisy(CERTAIN), CERTAIN), "rounding", "exactly 0 at 60%"),
    "certain policies": (lambda: sampled(spread=30.0), "rounding", ""),
    "other experts": (
        lambda: (
            np.where(HERE_AND_THERE, sampled(noise=1.0)[0], sampled()[0]),
            sampled()[1],
        ),
        ["heavy tail"],
        "of the squared gap",
    ),
    "some last tokens": (
        lambda: where((PLACE == 99) & (ROWS % 8 == 0), 20.0),
        ["last token"],
        "at the last token of sequences; the largest",
    ),
    "a weak line": (lambda: sampled_by(**WEAK), ["truncation"], ""),
    "a weak line that rises": (
        lambda: sampled_by(True, **WEAK),
        ["mean ratio"],
        "the mean ratio is",
    ),
    "higher": (lambda: biased(0.012), ["mean ratio"], "give at most 1"),
    "far higher": (lambda: biased(0.5, 16, 50), ["mean ratio"], ""),
    "not higher": (lambda: biased(0.0, 16, 50), "rounding", ""),
    "columns": (lambda: in_columns(8.0), ["template"], "from column 128 of the rows on"),
    "no columns": (lambda: in_columns(1.0), "rounding", ""),
    "raw logits": (
        lambda: sampled_by(True, **OF_CARDS),
        ["temperature", "mean ratio"],
        "the mean ratio is",
    ),
    "0.9": (lambda: sampled_by(temperature=0.9), ["temperature"], ""),
    "top-p": (lambda: sampled_by(top_p=0.95), ["truncation"], ""),
    "0.6 and top-p": (lambda: sampled_by(**OF_CARDS), ["temperature", "truncation"], ""),
    "penalty": (lambda: PENALIZED, ["repetition", "trend"], ""),
    "penalty, unknown tokens": (lambda: {**PENALIZED, "tokens": None}, ["trend"], ""),
    "an eighth": (lambda: where(ROWS % 8 == 0), ["padding"], ""),
    "the last": (lambda: where(PLACE == 99), ["last token"], ""),
    "tenfold": (lambda: where(True, 0.02 * 10 ** (PLACE / 100)), ["trend"], ""),
    "3% of the tokens": (
        lambda: where(np.tile(HERE_AND_THERE, (2, 1)), 2.0, policy_logp(128) - 8.0),
        ["heavy tail"],
        "",
    ),
    "greedy": (lambda: (sampled()[0], np.zeros((64, 100))), ["greedy"], "at all tokens"),
}


@pytest.mark.parametrize(("make", "expected", "words"), VERDICTS.values(), ids=VERDICTS)
def test_each_dump_is_called_what_it_is(make, expected, words):
    dump = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = mismatch(**dump) if isinstance(dump, dict) else mismatch(*dump)
    text = str(report)
    found = [*report.causes] if report.verdict == "bug" else report.verdict
    assert found == expected and words in text
    assert report.kind == ("" if isinstance(expected, str) else expected[0])
    assert all(MEANING[kind] in text for kind in report.causes)


@pytest.mark.parametrize("shape", (SHAPE, (16, 64)), ids=str)
def test_noise_of_any_distribution_is_no_bug_in_dumps_of_any_shape(shape):
    for noise, dump in noise_dumps.sound_dumps(20_000, shape, 0.02):
        report = mismatch(**dump)
        assert report.verdict != "bug", (noise, report.causes)


FILLED = {  # where fillers are, the tokens that count, and words
    "last": (lambda place, ends, begin: place == ends - 1, True, "at the last token of"),
    "first": (lambda place, ends, begin: place == 0, True, "at the first token of"),
    "runs": (lambda place, ends, begin: abs(place - begin) < 5, False, "runs of about 9 tokens"),
    "padding": (lambda place, ends, begin: place >= ends, False, "the last"),
    "prompts": (lambda place, ends, begin: place < begin, False, "the first"),
    "rows": (lambda place, ends, begin: ends % 3 == 0, False, "all tokens of"),
}


def test_a_large_dump_takes_less_than_sixty_bytes_a_token():
    draw = np.random.default_rng(0)
    actor = -draw.exponential(size=(256, 4000)).astype(np.float32)
    learner = np.minimum(actor * draw.normal(1, 0.01, actor.shape), 0).astype(np.float32)
    tokens, advantages = draw.integers(0, 1000, actor.shape), draw.normal(size=256)
    mismatch(learner[:, :100], actor[:, :100])  # what is imported at first
    tracemalloc.start()
    mismatch(learner, actor, tokens=tokens, advantages=advantages)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 60 * actor.size


@pytest.mark.parametrize(("whose", "constant"), [("actor", 0.0), ("learner", -100.0)])
@pytest.mark.parametrize(("tokens", "has_mask", "words"), FILLED.values(), ids=FILLED)
def test_fillers_are_found_and_located(tokens, has_mask, words, whose, constant):
    draw = torch.Generator().manual_seed(0)
    place = torch.arange(100)
    ends = torch.randint(33, 101, (64, 1), generator=draw)
    begin = torch.randint(6, 88, (64, 1), generator=draw)
    pair = dict(zip(("learner", "actor"), sampled(), strict=True))
    pair[whose] = pair[whose].masked_fill(tokens(place, ends, begin), constant)
    report = mismatch(pair["learner"], pair["actor"], place < ends if has_mask else None)
    says = report.headline()[1]
    assert report.kind == "filler" and words in says
    assert f"the {whose}'s log-probabilities are exactly {constant:g}" in says
    assert "are left: rounding, of " in report.notes[-1]
    assert any("Give a mask" in note for note in report.notes) != has_mask


@pytest.mark.parametrize(
    ("precision", "noise", "verdict"),
    [
        (None, 0.2, "rounding or bug"),
        ("bf16", 0.2, "bug"),
        ("fp8", 0.2, "rounding"),
        ("bf16", 0.02, "rounding"),
        ("fp16", 0.02, "bug"),
    ],
)
def test_fewer_bits_than_both_programs_claim_are_a_bug(precision, noise, verdict):
    report = mismatch(*sampled(noise=noise), precision=precision)
    assert (report.verdict, report.kind) == (verdict, "precision" if verdict == "bug" else "")
    assert report.precision == (precision or "")
    alarms = [
        note for note in report.notes if note.startswith("alarm: token_mult_prob_error is 1.1")
    ]
    assert len(alarms) == (noise == 0.2)


@pytest.mark.parametrize("length", [100, 8])
@pytest.mark.parametrize(("noise", "verdict"), [(0.02, "rounding"), (0.06, "bug")])
def test_a_gap_is_compared_with_that_of_a_sound_dump(noise, verdict, length):
    """Which may be short and have fillers."""
    learner, actor = sampled(128, length, noise=0.02)
    sound = {"learner_logp": learner, "actor_logp": actor.clone()}
    sound["actor_logp"][:, -1] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = mismatch(*sampled(128, length, noise=noise), sound=sound)
    assert (report.verdict, report.kind) == (verdict, "precision" if verdict == "bug" else "")
    assert ("k3 of tokens (" in str(report)) == (verdict == "bug")


def shares(**kinds: float) -> list[Seen]:
    """Symptoms that are seen, by kind and share of the squared gap."""
    return [Seen(kind, kind, 2.0, 1.0, "", share) for kind, share in kinds.items()]


@pytest.mark.parametrize(
    ("symptoms", "kinds"),  # what is named
    [
        (shares(), []),
        ([Seen("a trend", "trend", 0.9, 1.0, "", 1.0)], []),
        (shares(shift=0.9, trend=0.5), ["shift"]),
        (shares(truncation=0.4, temperature=0.36, trend=0.1), ["truncation", "temperature"]),
        (shares(weights=0.17, trend=0.1, stale=0.003), ["weights", "trend"]),
        (shares(stale=0.003, other=math.nan), ["stale"]),
        (shares(precision=math.nan), ["precision"]),
    ],
)
def test_kinds_are_named_by_what_they_explain_until_that_is_two_thirds(symptoms, kinds):
    assert kinds_of(symptoms) == kinds
