"""The code on the pages of bits/, doctor/ and dumps/ runs, and prints what the pages say."""

import contextlib
import io
import re
from pathlib import Path

import fp8rl

PACKAGE = Path(fp8rl.__file__).parent
BITS = (PACKAGE / "bits/README.md").read_text()
DOCTORS = (PACKAGE / "doctor/README.md").read_text()
DUMPS = (PACKAGE / "dumps/README.md").read_text()
(LOW_BIT_ADAM,) = re.findall(r"```python\n(.*?)```", BITS, re.S)
(PRINTED,) = re.findall(r"```\n(weights:.*?)```", BITS, re.S)
(DOCTOR,) = re.findall(r"```python\n(.*?)```", DOCTORS, re.S)
(MISMATCH,) = re.findall(r"```python\n(.*?)```", DUMPS, re.S)
(REPORTS,) = re.findall(r"```\n(rounding:.*?)```", DUMPS, re.S)


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
    beginnings = [
        line[:11] for line in printed(MISMATCH).splitlines()
    ]  # digits differ by processor
    shown = [line[:11] for line in REPORTS.splitlines()]
    assert [beginning for beginning in beginnings if beginning in shown] == shown
