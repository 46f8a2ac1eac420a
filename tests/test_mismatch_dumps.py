"""Dumps as RL stacks and their users write them: names, files, forms, and what is refused."""

import io
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch
from helpers import refused, run_doctor

from fp8rl.doctor import mismatch, read_dump

SEQUENCES, TOKENS = 24, 30
DRAW = torch.Generator().manual_seed(0)
ACTOR = -0.1 - 2 * torch.rand(SEQUENCES, TOKENS, generator=DRAW)
LEARNER = ACTOR + 0.01 * torch.randn(SEQUENCES, TOKENS, generator=DRAW)
LENGTHS = torch.randint(12, TOKENS + 1, (SEQUENCES, 1), generator=DRAW)
IS_ANSWER = torch.arange(TOKENS) < LENGTHS
IS_MODEL = torch.arange(TOKENS).expand(SEQUENCES, TOKENS) % 7 > 0  # not a tool's reply
ADVANTAGES = torch.randn(SEQUENCES, generator=DRAW)
OURS = {"learner_logp": LEARNER, "actor_logp": ACTOR, "mask": IS_ANSWER, "advantages": ADVANTAGES}
TRL = {
    "prompt_ids": torch.ones(SEQUENCES, 5).long(),
    "completion_mask": IS_ANSWER.long(),
    "tool_mask": IS_MODEL.int(),
    "old_per_token_logps": LEARNER,
    "sampling_per_token_logps": ACTOR,
    "ref_per_token_logps": None,
    "advantages": ADVANTAGES,
    "num_items_in_batch": 300,
}
VERL = {
    "attention_mask": torch.ones(SEQUENCES, TOKENS + 5),
    "old_log_probs": LEARNER,
    "rollout_log_probs": ACTOR,
    "response_mask": IS_ANSWER.float(),
    "advantages": ADVANTAGES[:, None].expand(SEQUENCES, TOKENS),
    "responses": torch.ones(SEQUENCES, TOKENS + 5),  # of other tokens
}
OPENRLHF = {"action_log_probs": LEARNER, "rollout_log_probs": ACTOR, "action_mask": IS_ANSWER}
NEMO = {
    "prev_logprobs": LEARNER,
    "generation_logprobs": ACTOR,
    "token_mask": IS_ANSWER,
    "sample_mask": (torch.arange(SEQUENCES) > 2).float(),
}
PACKED = {
    "learner_logp": LEARNER[IS_ANSWER],
    "actor_logp": ACTOR[IS_ANSWER],
    "lengths": LENGTHS[:, 0],
    "advantages": ADVANTAGES,
}
EXPECTED = mismatch(**OURS)


def rows_of(x: torch.Tensor) -> list[torch.Tensor]:
    """The tokens of each answer."""
    return [row[:length] for row, length in zip(x, LENGTHS[:, 0], strict=True)]


def in_rows(form) -> dict:
    """A ragged dump whose arrays have a form."""
    arrays = {name: form(rows_of(OURS[name])) for name in ("learner_logp", "actor_logp")}
    return {**arrays, "advantages": ADVANTAGES.tolist()}


SAME = {
    "ours": OURS,
    "verl": VERL,
    "verl in NumPy": {name: x.numpy() for name, x in VERL.items()},
    "TRL": {**TRL, "tool_mask": None},
    "OpenRLHF": {**OPENRLHF, "advantages": ADVANTAGES[:, None]},
    "slime": {
        "log_probs": rows_of(LEARNER),
        "rollout_log_probs": rows_of(ACTOR),
        "loss_masks": rows_of(IS_ANSWER.long()),
        "advantages": ADVANTAGES,
    },
    "prime-rl": {
        "trainer_logprobs": LEARNER,
        "inference_logprobs": ACTOR,
        "loss_mask": IS_ANSWER,
        "advantages": ADVANTAGES,
    },
    "SkyRL": {
        "action_log_probs": LEARNER,
        "rollout_logprobs": ACTOR,
        "response_mask": torch.ones(SEQUENCES, TOKENS),
        "loss_mask": IS_ANSWER,
        "advantages": ADVANTAGES,
    },
    "columns": {**OURS, "advantages": ADVANTAGES[:, None].tolist()},
    "uint8": {**OURS, "mask": IS_ANSWER.to(torch.uint8)},
    "bfloat16": {**OURS, "mask": IS_ANSWER.bfloat16()},
    "tensors": in_rows(list),
    "lists": in_rows(lambda rows: [row.tolist() for row in rows]),
    "objects": in_rows(lambda rows: np.array([row.numpy() for row in rows], dtype=object)),
    "nested": in_rows(lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged)),
    "packed": PACKED,
    "packed row": {
        **PACKED,
        "actor_logp": PACKED["actor_logp"][None],
        "lengths": LENGTHS[:, 0].tolist(),
    },
    "packed list": {**PACKED, "learner_logp": PACKED["learner_logp"].tolist()},
}


def assert_same(report, times: int = 1) -> None:
    assert report.verdict == "rounding"
    assert (report.numbers.tokens, report.numbers.sequences) == (
        EXPECTED.numbers.tokens * times,
        SEQUENCES * times,
    )
    for name in ("kl_k3", "clipped_above", "sequence_sample_size", "clipped"):
        assert getattr(report.numbers, name) == pytest.approx(getattr(EXPECTED.numbers, name))


@pytest.mark.parametrize("name", SAME)
def test_a_dump_of_any_stack_in_any_form_gives_the_same_report(name, tmp_path):
    assert_same(mismatch(SAME[name]))
    torch.save(
        {"meta": 3, "batch": SAME[name]} if name == "verl" else SAME[name], tmp_path / "a.pt"
    )
    if all(isinstance(x, torch.Tensor | list) for x in SAME[name].values()):
        assert_same(mismatch(**read_dump(tmp_path / "a.pt")))


def test_a_token_counts_if_it_is_in_both_masks_of_a_stack():
    counts = IS_ANSWER & IS_MODEL
    assert mismatch(TRL) == mismatch(LEARNER, ACTOR, counts, ADVANTAGES)
    assert mismatch(NEMO).numbers.sequences == SEQUENCES - 3


def test_a_token_that_a_program_could_not_score_is_left_out_and_counted():
    actor = ACTOR.clone()
    actor[3, :2] = math.nan
    report = mismatch({**TRL, "tool_mask": None, "sampling_per_token_logps": actor})
    assert report.numbers.tokens == EXPECTED.numbers.tokens - 2
    assert "note: tokens left out, because a program has NaN there: 2" in report.notes


def test_numbers_that_were_rounded_to_decimals_are_said_to_be():
    report = mismatch(LEARNER.round(decimals=3), ACTOR.round(decimals=3), IS_ANSWER)
    assert report.verdict == "rounding" and "steps of 0.001" in report.notes[-1]


def halves(dump: dict) -> list[dict]:
    return [{name: x[i : i + 12] for name, x in dump.items()} for i in (0, 12)]


def lines(records: list[dict]) -> bytes:
    as_lists = [
        {k: x.tolist() if hasattr(x, "tolist") else x for k, x in r.items()} for r in records
    ]
    return "".join(json.dumps(record) + "\n" for record in as_lists).encode()


ONE_BY_ONE = [
    {"learner_logp": learner, "actor_logp": actor, "advantages": gain, "responses": "two and two"}
    for learner, actor, gain in zip(rows_of(LEARNER), rows_of(ACTOR), ADVANTAGES, strict=True)
]
RECORDS = {"sequences": ONE_BY_ONE, "batches": halves(VERL), "packed": [PACKED, PACKED]}


@pytest.mark.parametrize("ending", ["pt", "jsonl"])
@pytest.mark.parametrize("name", RECORDS)
def test_records_of_sequences_and_of_batches_give_the_same_report(name, ending, tmp_path):
    path = tmp_path / f"dump.{ending}"
    torch.save(RECORDS[name], path)
    if ending == "jsonl":
        path.write_bytes(lines(RECORDS[name]))
    assert_same(mismatch(**read_dump(path)), times=1 + (name == "packed"))


def test_types_of_half_precision_are_kept(tmp_path):
    half = {
        "old_log_probs": LEARNER.bfloat16(),
        "rollout_log_probs": ACTOR.half(),
        "advantages": ADVANTAGES.bfloat16(),
    }
    expected = mismatch(half)
    assert "lower bound" in str(expected)
    one_by_one = [dict(zip(half, rows, strict=True)) for rows in zip(*half.values(), strict=True)]
    for content in (half, [half], one_by_one, halves(half)):
        torch.save(content, tmp_path / "dump.pt")
        assert mismatch(**read_dump(tmp_path / "dump.pt")) == expected


# What is refused


SMALL_LEARNER = np.log([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]])
SMALL_ACTOR = np.log([[0.4, 0.25, 0.9], [0.35, 0.4, 0.2]])
BOTH = {"learner_logp": SMALL_LEARNER, "actor_logp": SMALL_ACTOR}


def with_entry(array: np.ndarray, value: float) -> np.ndarray:
    changed = np.array(array)
    changed[1, 2] = value
    return changed


def packed(lengths) -> dict:
    return {name: x.ravel() for name, x in BOTH.items()} | {"lengths": lengths}


REFUSED = {
    "learner_logp has 2 tokens in sequence 0": {"learner_logp": SMALL_LEARNER[:, :2]},
    "learner_logp has 3 sequences": {"learner_logp": SMALL_LEARNER[[0, 1, 1]]},
    "learner_logp is a single row of 6 tokens: give lengths": packed(None),
    "learner_logp[1] has the shape (1, 3)": {"learner_logp": [SMALL_LEARNER[0], SMALL_LEARNER[1:]]},
    "learner_logp[1] is torch.int64": {"learner_logp": [SMALL_LEARNER[0], torch.zeros(3).long()]},
    "learner_logp has the shape (1, 2, 3)": {"learner_logp": SMALL_LEARNER[None]},
    "learner_logp has no tokens": {"learner_logp": SMALL_LEARNER[:0]},
    "learner_logp or actor_logp is NaN at each": {"learner_logp": np.full((2, 3), np.nan)},
    "learner_logp is 0.001 at [1, 2]": {"learner_logp": with_entry(SMALL_LEARNER, 0.001)},
    "learner_logp is object": {"learner_logp": np.full((2, 3), None)},
    "learner_logp is torch.complex64": {"learner_logp": LEARNER.to(torch.complex64)},
    "learner_logp is no array of numbers": {"learner_logp": LEARNER.to_sparse()},
    "learner_logp is no array of": {"learner_logp": LEARNER.to("meta")},
    "actor_logp is -inf at [1, 2]": {"actor_logp": with_entry(SMALL_ACTOR, -np.inf)},
    "actor_logp is -1e+09 at [1, 2]: mask fillers": {"actor_logp": with_entry(SMALL_ACTOR, -1e9)},
    "actor_logp is int64": {"actor_logp": np.zeros((2, 3), np.int64)},
    "actor_logp is 1 at [0, 1]: give logarithms of probabilities, which are at most 0, and mask "
    "fillers (4 of 6 tokens are impossible)": {"actor_logp": SMALL_ACTOR * 0 + [-1.0, 1.0, 1.0]},
    "lengths has the sum 5": packed([2, 3]),
    "lengths has the sum 9, but learner_logp has 6 tokens: these look cumulated": packed([0, 3, 6]),
    "lengths is -1 at [1]": packed([7, -1]),
    "lengths is 2.5 at [0]": packed([2.5, 3.5]),
    "lengths has the shape (1, 2)": packed([[3, 3]]),
    "lengths is given, but learner_logp has the shape (2, 3)": {"lengths": [3, 3]},
    "lengths differs from the lengths of the lists": {name: x.tolist() for name, x in BOTH.items()}
    | {"learner_logp": [[-1.0], [-1.0]], "lengths": [1, 2]},
    "mask is False everywhere": {"mask": np.zeros((2, 3), bool)},
    "mask has 1 sequences": {"mask": np.ones(3, bool)},
    "mask is 0.5 at [0, 0]": {"mask": np.full((2, 3), 0.5)},
    "mask is nan at [1, 2]": {"mask": with_entry(np.ones((2, 3)), np.nan)},
    "mask is <U1: give booleans, or 0 and 1": {"mask": np.full((2, 3), "1")},
    "advantages has the shape (3,)": {"advantages": np.ones(3)},
    "advantages is nan at [1]": {"advantages": [1.0, np.nan]},
    "advantages is inf at [1, 2]": {"advantages": with_entry(np.ones((2, 3)), np.inf)},
    "tokens has 1 sequences": {"tokens": np.ones(3, int)},
    "tokens is 0.5 at [0, 0]: give whole numbers": {"tokens": np.full((2, 3), 0.5)},
    "precision is 'bf17': use one of fp32,": {"precision": "bf17"},
    "precision is nan: use one of fp32,": {"precision": math.nan},
    "clip is 0:": {"clip": 0},
    "clip is '0.2'": {"clip": "0.2"},
    # Names
    "learner_logp is a dict, which has no learner_logp (or old_per_token_logps, old_log_probs, "
    "action_log_probs, prev_logprobs, log_probs, trainer_logprobs): there is rollout_log_probs, "
    "\\n": {
        "learner_logp": {"rollout_log_probs": ACTOR, "\n": ACTOR},
        "actor_logp": None,
    },
    "learner_logp is a dict, which has no actor_logp": {
        "learner_logp": {"old_log_probs": LEARNER},
        "actor_logp": None,
    },
    "actor_logp is missing": {"actor_logp": None},
    "mask is given twice": {"learner_logp": OURS, "actor_logp": None, "mask": IS_ANSWER},
    "learner_logp is a dict, which has learner_logp and old_log_probs: keep one": {
        "learner_logp": {**VERL, "learner_logp": LEARNER},
        "actor_logp": None,
    },
    "tool_mask has other sizes than completion_mask": {
        "learner_logp": {**TRL, "tool_mask": IS_MODEL[:, 1:]},
        "actor_logp": None,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_log_probabilities_is_refused_in_one_line(message):
    refused(re.escape(message), mismatch, **(BOTH | REFUSED[message]))


def test_the_command_prints_the_report_of_a_file(tmp_path, capfd):
    arrays = {name: np.asfortranarray(x.numpy()) for name, x in OURS.items()}
    np.savez_compressed(tmp_path / "dump.npz", **arrays, responses=IS_ANSWER.long().numpy())
    assert read_dump(tmp_path / "dump.npz")["tokens"].shape == (SEQUENCES, TOKENS)
    quiet = {**arrays, "learner_logp": arrays["actor_logp"] + 0.1 * (LEARNER - ACTOR).numpy()}
    np.savez(tmp_path / "sound.npz", **quiet)
    expected = mismatch(arrays, clip=0.1, precision="bf16", sound=quiet, tokens=IS_ANSWER.long())
    words = (
        capfd,
        "mismatch",
        tmp_path / "dump.npz",
        *("--clip", 0.1, "--precision", "bf16", "--sound", tmp_path / "sound.npz", "--stacks"),
    )
    file = tmp_path / "r.json"
    assert run_doctor(*words, "--json", file) == (0, f"{expected}\n{expected.stack_table()}\n", "")
    assert file.read_text() == expected.to_json()
    assert "json is" in run_doctor(*words, "--json", file)[2]  # which exists


class Executed:
    """A pickle that would run code."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code of the dump was run')",)


def saved(content, save=torch.save) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    save(buffer, **content) if save is np.savez else save(content, buffer)
    return buffer.getvalue()


FILES = {  # what a file is called and holds, and words of the error
    "missing": ("npz", None, "cannot be read: No such file or directory; save arrays by"),
    "an actor alone": ("npz", saved({"actor_logp": SMALL_ACTOR}, np.savez), "has no learner_logp"),
    "objects in NumPy": (
        "npz",
        saved({**BOTH, "actor_logp": np.full((2, 3), None)}, np.savez),
        "it holds an object, not numbers alone",
    ),
    "cut off": ("npz", saved(BOTH, np.savez)[:-40], "File is not a zip file"),
    "a text": ("npz", b"text", "it holds an object"),
    "half a mask": ("npz", saved({**BOTH, "mask": np.full((2, 3), 0.5)}, np.savez), "mask is 0.5"),
    "an object": ("pt", saved(DRAW), "it holds an object, not numbers alone"),
    "code": ("pt", saved({**VERL, "extra": Executed()}), "it holds an object"),
    "NumPy in torch": ("pth", saved({"old_log_probs": SMALL_LEARNER}), "it holds an object"),
    "a pickle": ("pt", pickle.dumps(Executed()), "it is no complete file of torch.save"),
    "another pickle": ("dp", pickle.dumps(Executed()), "ends with .npz, .pt, .pth, .jsonl;"),
    "no names": ("pt", saved(LEARNER), "cannot be read: "),
    "a text among arrays": ("pt", saved({**VERL, "old_log_probs": "a"}), "no learner_logp"),
    "nothing": ("pt", saved([]), "which has no records"),
    "no lines": ("jsonl", b"\n", "which has no records"),
    "no object": ("jsonl", b"[1, 2]\n", "line 1 is no complete JSON object"),
    "half an object": ("jsonl", lines([BOTH]) + b'{"le', "line 2 is no complete JSON object"),
    "too deep": ("jsonl", b"[" * 100_000, "line 1 is no complete JSON object"),
    "letters": ("jsonl", lines([BOTH | {"learner_logp": [["a"]]}]), "learner_logp[0] is <U1"),
    "other names": (
        "jsonl",
        lines([BOTH, BOTH | {"mask": [[1]]}]),
        "line 2, which has not the names",
    ),
    "texts": ("jsonl", b'{"input": "a", "gts": null}\n', "there is input, gts"),
    "unequal": (
        "jsonl",
        lines([{"learner_logp": [-1], "actor_logp": [-1, -2]}] * 2),
        "has 1 tokens",
    ),
}


@pytest.mark.parametrize(("ending", "content", "words"), FILES.values(), ids=FILES)
def test_a_file_of_a_stranger_is_refused_in_one_line_and_nothing_is_run(
    ending, content, words, tmp_path, capfd
):
    path = tmp_path / f"dump.{ending}"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run_doctor(capfd, "mismatch", path)
    assert (code, out) == (2, "") and words in err
    assert err.startswith("fp8rl.doctor: ") and err.count("\n") == 1
