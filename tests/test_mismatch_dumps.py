"""Dumps as RL stacks and their users write them: names, files, forms, and what is refused."""

import json
import pickle
import re
import sys
import types

import numpy as np
import pytest
import torch
from helpers import refused

from fp8rl.doctor import command as doctor
from fp8rl.dumps.dump import read_dump
from fp8rl.dumps.mismatch import mismatch

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
}
NEMO = {
    "prev_logprobs": LEARNER,
    "generation_logprobs": ACTOR,
    "token_mask": IS_ANSWER,
    "sample_mask": (torch.arange(SEQUENCES) > 2).float(),
}
EXPECTED = mismatch(**OURS)


@pytest.fixture
def run(capfd):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            doctor.main(["mismatch", *map(str, arguments)])
        captured = capfd.readouterr()
        return end.value.code, captured.out, captured.err

    return run


# Names


def test_a_dict_of_any_stack_is_taken_as_it_is(tmp_path):
    assert mismatch(OURS) == mismatch(VERL) == EXPECTED
    without_tools = mismatch(LEARNER, ACTOR, IS_ANSWER & IS_MODEL, ADVANTAGES)
    assert mismatch(TRL) == without_tools
    assert mismatch({**TRL, "tool_mask": None}) == EXPECTED
    assert mismatch(NEMO).sequences == SEQUENCES - 3
    openrlhf = {"action_log_probs": LEARNER, "rollout_log_probs": ACTOR, "action_mask": IS_ANSWER}
    assert mismatch(openrlhf, advantages=ADVANTAGES) == EXPECTED
    arrays = {name: x.numpy() for name, x in VERL.items()}
    assert mismatch(arrays) == EXPECTED
    with np.load(written(tmp_path, arrays)) as file:
        assert mismatch(file) == EXPECTED


def written(folder, arrays):
    np.savez(folder / "dump.npz", **arrays)
    return folder / "dump.npz"


REFUSED_NAMES = {
    "which has no learner_logp (or old_per_token_logps, old_log_probs, action_log_probs, "
    "prev_logprobs): there is rollout_log_probs, input_ids": {
        "rollout_log_probs": ACTOR,
        "input_ids": ACTOR,
    },
    "which has no actor_logp": {"old_log_probs": LEARNER},
    "there is nothing in it": {},
    "which has learner_logp and old_log_probs: keep one": {**VERL, "learner_logp": LEARNER},
    "which has completion_mask and response_mask: keep one": {**VERL, "completion_mask": IS_ANSWER},
    "tool_mask has other sizes than completion_mask: give masks of the same tokens": {
        **TRL,
        "tool_mask": IS_MODEL[:, 1:],
    },
    "mask is 0.5 at [0, 1]": {**TRL, "tool_mask": torch.where(IS_MODEL, 0.5, 0.0)},
    r"there is prompt, \n\n": {"prompt": "a", "\n\n": 1},
}


@pytest.mark.parametrize("message", REFUSED_NAMES)
def test_names_that_are_missing_or_ambiguous_are_refused_in_one_line(message):
    refused(".*" + re.escape(message), mismatch, REFUSED_NAMES[message])


def test_arrays_are_given_once():
    refused("mask is given twice", mismatch, OURS, mask=IS_ANSWER)
    refused("actor_logp is missing", mismatch, LEARNER)


# Forms


def test_masks_of_zeros_and_ones_of_any_type_are_the_same():
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64):
        assert mismatch(LEARNER, ACTOR, IS_ANSWER.to(dtype), ADVANTAGES) == EXPECTED
    strings = np.where(IS_ANSWER, "1", "0")
    refused("mask is <U1: give booleans, or 0 and 1", mismatch, LEARNER, ACTOR, strings)


def test_advantages_may_be_a_column():
    assert mismatch(LEARNER, ACTOR, IS_ANSWER, ADVANTAGES[:, None]) == EXPECTED
    assert mismatch(LEARNER, ACTOR, IS_ANSWER, ADVANTAGES[:, None].tolist()) == EXPECTED


def test_padding_and_tool_tokens_that_count_are_named_where_there_is_no_mask():
    advice = "Give a mask: padding and tool tokens out."
    counts = IS_ANSWER & IS_MODEL
    both = mismatch(torch.where(counts, LEARNER, 0.0), torch.where(counts, ACTOR, 0.0))
    tools = mismatch(LEARNER, torch.where(IS_MODEL, ACTOR, 0.0))
    for report in (both, tools):
        assert advice in str(report)
    assert advice not in str(mismatch(LEARNER, ACTOR))
    everything = torch.ones_like(counts)
    assert advice not in str(mismatch(LEARNER, torch.where(IS_MODEL, ACTOR, 0.0), everything))


# Files


def rows_of(x) -> list[list]:
    """The tokens of each answer."""
    return [row[:length].tolist() for row, length in zip(x, LENGTHS[:, 0], strict=True)]


def write_json_lines(path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_files_of_every_kind_give_the_same_report(tmp_path):
    np.savez(tmp_path / "verl.npz", **{name: x.numpy() for name, x in VERL.items()})
    torch.save(VERL, tmp_path / "verl.pt")
    torch.save({"batch": VERL, "meta": {"step": 3}}, tmp_path / "inner.pth")
    halves = [{name: x[i : i + 12] for name, x in VERL.items()} for i in (0, 12)]
    torch.save(halves, tmp_path / "list.pt")
    nested = torch.nested.nested_tensor(
        [torch.tensor(row) for row in rows_of(LEARNER)], layout=torch.jagged
    )
    of_actor = torch.nested.nested_tensor(
        [torch.tensor(row) for row in rows_of(ACTOR)], layout=torch.jagged
    )
    jagged = {
        "old_log_probs": nested,
        "rollout_log_probs": of_actor,
        "advantages": ADVANTAGES.tolist(),
    }
    torch.save(jagged, tmp_path / "jagged.pt")
    # Float32's numbers, written as decimals, are float64's.
    records = [
        {"learner_logp": learner, "actor_logp": actor, "advantages": gain, "prompt": "two and two"}
        for learner, actor, gain in zip(
            rows_of(LEARNER), rows_of(ACTOR), ADVANTAGES.tolist(), strict=True
        )
    ]
    write_json_lines(tmp_path / "sequences.jsonl", records)
    batches = [{name: x.tolist() for name, x in half.items()} for half in halves]
    write_json_lines(tmp_path / "batches.jsonl", batches)
    for path in tmp_path.iterdir():
        report = mismatch(**read_dump(path))
        assert report.verdict == "rounding", path
        assert (report.tokens, report.sequences) == (EXPECTED.tokens, SEQUENCES), path
        for name in ("kl_k3", "clipped_above", "sequence_sample_size", "mean_ratio_error"):
            assert getattr(report, name) == pytest.approx(getattr(EXPECTED, name)), (path, name)


def test_packed_rows_have_lengths_in_any_file(tmp_path):
    packed = {
        "learner_logp": LEARNER[IS_ANSWER],
        "actor_logp": ACTOR[IS_ANSWER],
        "lengths": LENGTHS[:, 0],
        "advantages": ADVANTAGES,
    }
    torch.save(packed, tmp_path / "dict.pt")
    torch.save([packed, packed], tmp_path / "list.pt")
    record = {name: x.tolist() for name, x in packed.items()}
    write_json_lines(tmp_path / "one.jsonl", [record])
    for name, times in (("dict.pt", 1), ("list.pt", 2), ("one.jsonl", 1)):
        report = mismatch(**read_dump(tmp_path / name))
        assert (report.tokens, report.sequences) == (EXPECTED.tokens * times, SEQUENCES * times)
        assert report.clipped_above == EXPECTED.clipped_above


def test_types_of_half_precision_are_kept(tmp_path):
    half = {"old_log_probs": LEARNER.bfloat16(), "rollout_log_probs": ACTOR.half()}
    torch.save(half, tmp_path / "dict.pt")
    torch.save([half], tmp_path / "list.pt")
    assert mismatch(**read_dump(tmp_path / "dict.pt")) == mismatch(half)
    assert mismatch(**read_dump(tmp_path / "list.pt")) == mismatch(half)
    one_by_one = [
        {"old_log_probs": learner, "rollout_log_probs": actor, "advantages": gain}
        for learner, actor, gain in zip(
            LEARNER.bfloat16(), ACTOR.half(), ADVANTAGES.bfloat16(), strict=True
        )
    ]
    torch.save(one_by_one, tmp_path / "sequences.pt")
    report = mismatch(**read_dump(tmp_path / "sequences.pt"))
    assert report == mismatch(half, advantages=ADVANTAGES.bfloat16())
    batch = {**half, "advantages": ADVANTAGES.bfloat16()}
    torch.save([batch], tmp_path / "batch.pt")
    assert mismatch(**read_dump(tmp_path / "batch.pt")) == report
    assert "lower bound" in str(mismatch(half))


# What is refused


class Executed:
    """A pickle that would run code."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code of the dump was run')",)


def verl_protocol() -> types.ModuleType:
    """A module with a class that has the name of verl's."""
    module = types.ModuleType("verl.protocol")
    module.DataProto = type("DataProto", (), {"__module__": "verl.protocol"})
    return module


def test_objects_are_refused_by_name_and_nothing_is_run(tmp_path, monkeypatch):
    module = verl_protocol()
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    batch = module.DataProto()
    torch.save(batch, tmp_path / "batch.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(batch))
    (tmp_path / "gen_batch.dp").write_bytes(pickle.dumps(batch))
    torch.save({**VERL, "extra": Executed()}, tmp_path / "code.pt")
    (tmp_path / "code.pth").write_bytes(pickle.dumps(Executed()))
    torch.save({**VERL, "old_log_probs": LEARNER.numpy()}, tmp_path / "numpy.pt")
    for name, words in {
        "batch.pt": "it holds an object, not numbers alone; save arrays by numpy.savez",
        "pickle.pt": "it is no complete file of torch.save",
        "gen_batch.dp": "use a file that ends with .npz",
        "code.pt": "it holds an object",
        "code.pth": "it is no complete file of torch.save",
        "numpy.pt": "it holds an object",
    }.items():
        refused(".*" + re.escape(words), read_dump, tmp_path / name)


def test_tensors_without_plain_numbers_are_refused(tmp_path):
    lists = [LEARNER]
    lists.append(lists)
    for i, (words, learner) in enumerate(
        {
            "no learner_logp": "text",
            "learner_logp is no array": LEARNER.to_sparse(),
            "learner_logp is no array of": LEARNER.to("meta"),
            "torch.complex64": LEARNER.to(torch.complex64),
            "learner_logp is no array of numbers": torch.zeros(1).expand(10**6, 10**6),
            "learner_logp[1] is no array of numbers": lists,
        }.items()
    ):
        torch.save({**VERL, "old_log_probs": learner}, tmp_path / f"{i}.pt")
        refused(".*" + re.escape(words), lambda i=i: mismatch(**read_dump(tmp_path / f"{i}.pt")))
    torch.save(LEARNER, tmp_path / "one.pt")
    refused(".*cannot be read", read_dump, tmp_path / "one.pt")


LINES = {
    "line 2 is no complete JSON object": '{"learner_logp": [-1, -2], "actor_logp": [-1, -2]}\n{"le',
    "line 1 is no complete JSON object;": "[1, 2]\n",
    "line 1 is no complete JSON object": "[" * 100_000,
    "learner_logp[0] is <U3": '{"learner_logp": ["a", "abc"], "actor_logp": [-1.0, -1.0]}\n',
    "line 1, which has no actor_logp": '{"learner_logp": [-1.0], "actor_logp": "-1"}\n',
    "learner_logp[0] is object": '{"learner_logp": [{}], "actor_logp": [-1.0]}\n',
    "learner_logp[0] is object:": f'{{"learner_logp": [-{10**400}], "actor_logp": [-1]}}\n',
    "line 2, which has not the names of the first: learner_logp, actor_logp": (
        '{"learner_logp": [-1], "actor_logp": [-1]}\n'
        '{"learner_logp": [-1], "actor_logp": [-1], "mask": [1]}\n'
    ),
    "which has no records": "\n",
    "there is input, output, gts": '{"input": "a", "output": "b", "gts": null}\n',
    "learner_logp has 1 tokens in sequence 0": (
        '{"learner_logp": [-1], "actor_logp": [-1, -2]}\n' * 2
    ),
}


@pytest.mark.parametrize("words", LINES)
def test_lines_that_are_no_records_are_refused_by_number(words, tmp_path, run):
    path = tmp_path / "dump.jsonl"
    path.write_text(LINES[words])
    code, out, err = run(path)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_file_that_is_cut_off_or_changed_makes_no_traceback(tmp_path, run):
    draw = np.random.default_rng(0)
    torch.save(VERL, tmp_path / "good.pt")
    record = {name: x[0].tolist() for name, x in VERL.items()}
    write_json_lines(tmp_path / "good.jsonl", [record])
    for ending in ("pt", "jsonl"):
        good = (tmp_path / f"good.{ending}").read_bytes()
        path = tmp_path / f"dump.{ending}"
        for i in range(60):
            content = bytearray(good)
            if i % 3:
                content[draw.integers(len(content))] = draw.integers(256)
            else:
                content = content[: draw.integers(len(content))]
            path.write_bytes(content)
            code, _, err = run(path)
            assert code == 0 or (code == 2 and err.count("\n") == 1), err


def test_an_ending_that_is_not_known_is_refused(tmp_path, run):
    code, _, err = run(tmp_path / "dump.npy")
    assert code == 2 and "use a file that ends with .npz, .pt, .pth, .jsonl;" in err


# The numbers that stacks log


def test_each_number_of_the_stacks_is_that_of_its_formula():
    learner = np.log([[0.5, 0.2], [0.9, 0.3]])
    actor = np.log([[0.4, 0.25], [0.9, 0.6]])
    report = mismatch(learner, actor)
    assert report.token_mult_prob_error == pytest.approx((1.25 + 1.25 + 1 + 2) / 4)
    assert report.probs_diff_mean == pytest.approx((0.1 + 0.05 + 0 + 0.3) / 4)
    assert report.probs_diff_max == pytest.approx(0.3)
    expected = np.corrcoef([0.5, 0.2, 0.9, 0.3], [0.4, 0.25, 0.9, 0.6])[0, 1]
    assert report.probs_correlation == pytest.approx(expected)
    assert report.logp_diff_mean == pytest.approx((2 * np.log(1.25) + np.log(2)) / 4)
    assert report.logp_diff_max == pytest.approx(np.log(2))
    assert json.loads(report.to_json())["token_mult_prob_error"] == report.token_mult_prob_error
    text = str(report)
    assert "token_mult_prob_error: 1.3750" in text and "Pearson correlation" in text


def test_numbers_of_policies_that_are_equal_or_do_not_vary_have_no_warning():
    with np.errstate(all="raise"):
        same = mismatch(ACTOR, ACTOR)
        even = mismatch(np.full((2, 2), -1.0), np.full((2, 2), -1.0))
    assert same.token_mult_prob_error == 1 and same.horizon == np.inf
    assert np.isnan(even.probs_correlation)


def test_the_numbers_of_tokens_are_taken_by_the_names_of_stacks(tmp_path):
    """A repetition penalty is then found; numbers of other tokens are left alone."""
    logp = np.full((2, 3), -1.0)
    batch = {"old_log_probs": logp, "rollout_log_probs": logp, "responses": np.ones((2, 3), int)}
    np.savez(tmp_path / "batch.npz", **batch)
    assert read_dump(tmp_path / "batch.npz")["tokens"].tolist() == [[1, 1, 1]] * 2
    np.savez(tmp_path / "longer.npz", **batch | {"responses": np.ones((2, 5), int)})
    assert "tokens" not in read_dump(tmp_path / "longer.npz")
    record = {"old_log_probs": [-1.0], "rollout_log_probs": [-1.0], "responses": "a text"}
    (tmp_path / "texts.jsonl").write_text(json.dumps(record))
    assert "tokens" not in read_dump(tmp_path / "texts.jsonl")
