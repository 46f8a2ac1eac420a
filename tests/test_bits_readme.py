"""The code on the pages of bits/ and doctor/ runs, and prints what the pages say."""

import contextlib
import io
import re
from pathlib import Path

import fp8rl

PACKAGE = Path(fp8rl.__file__).parent
BITS = (PACKAGE / "bits/README.md").read_text()
DOCTORS = (PACKAGE / "doctor/README.md").read_text()
(LOW_BIT_ADAM,) = re.findall(r"```python\n(.*?)```", BITS, re.S)
(PRINTED,) = re.findall(r"```\n(weights:.*?)```", BITS, re.S)
DOCTOR, MISMATCH, STACKS, PACKED = re.findall(r"```python\n(.*?)```", DOCTORS, re.S)
(REPORTS,) = re.findall(r"```\n(rounding:.*?)```", DOCTORS, re.S)
(STACK_TABLE,) = re.findall(r"```\n(stack  .*?)```", DOCTORS, re.S)


def printed(code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()


def test_the_optimizer_stores_what_the_page_says():
    assert printed(LOW_BIT_ADAM) == PRINTED


def test_the_doctor_reports_on_every_format():
    report = printed(DOCTOR)
    for text in ("weights=bf16:", "weights=bf16:stochastic:", "v=e4m3:unscaled:"):
        assert f"  {text} " in report


def test_the_gap_of_bfloat16_is_rounding_and_that_of_a_temperature_is_not():
    beginnings = []
    for text in (printed(MISMATCH), REPORTS):  # the last digits differ by processor
        beginnings.append([line[:12] for line in text.splitlines()])
    assert beginnings[0] == beginnings[1]


def test_stacks_do_with_the_gap_of_a_temperature_what_the_page_says():
    rows = [line.split("  ")[0] for line in STACK_TABLE.splitlines()]
    printed_rows = printed(MISMATCH + STACKS).splitlines()[-len(rows) :]
    assert [line.split("  ")[0] for line in printed_rows] == rows
    assert printed_rows[1].split()[-6:-2] == STACK_TABLE.splitlines()[1].split()[-6:-2]


def test_packed_and_ragged_tokens_give_the_same_report():
    printed(MISMATCH + PACKED)  # it has an assertion
