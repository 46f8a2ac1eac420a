"""The code on the page of bits/ runs, and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

import fp8rl.bits

PAGE = (Path(fp8rl.bits.__file__).parent / "README.md").read_text()
DOCTOR, MISMATCH, PACKED, LOW_BIT_ADAM = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(REPORTS,) = re.findall(r"```\n(rounding:.*?)```", PAGE, re.S)
(PRINTED,) = re.findall(r"```\n(weights:.*?)```", PAGE, re.S)


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


def test_packed_and_ragged_tokens_give_the_same_report():
    printed(MISMATCH + PACKED)  # it has an assertion
