"""Reading one case: what is there is kept, what is wrong is named."""

import pytest

from shardproof.jsonfiles import RecordError, decode
from shardproof.runfile import CaseRecord
from tests.errors import error_of
from tests.reports import samples

FIRST = {"stage": "gathered parameter", "values": {"sharded": 1.5, "baseline": "nan"}, "ulps": {"sharded": "inf"}}
EXPLAINED = samples.EXPLANATION | {"first": samples.EXPLANATION["first"] | FIRST}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"again": "pass", "first": None}, "passed when it ran again: the failure is not steady"),
        ({"first": None}, "ValueError: no"),
    ],
)
def test_the_reason_where_no_divergence_is_known(change, reason):
    failure = {"text": "Traceback\nValueError: no"}
    record = decode(CaseRecord, samples.case(verdict="fail", failure=failure, explanation=EXPLAINED | change), "")
    assert record.reason == reason
    assert decode(CaseRecord, samples.case(verdict="fail", failure=failure), "").reason == "ValueError: no"


def test_null_is_as_good_as_missing_for_an_optional_field():
    record = decode(CaseRecord, samples.case(failure=None, losses=None, missing=None, nodeid=None), "cases[0]")
    assert (record.failure, record.losses, record.missing, record.nodeid) == (None, {}, (), "")


def test_a_field_from_a_newer_writer_is_left_alone():
    assert decode(CaseRecord, samples.case(colour="red"), "cases[0]") == decode(CaseRecord, samples.case(), "cases[0]")


VERDICTS = "harness-error, crash, fail, hang, unmet, unsupported, expected-fail, unexpected-pass, pass"


def refusal(data):
    return error_of(decode, CaseRecord, data, "cases[3]", kind=RecordError)


@pytest.mark.parametrize("name", sorted(samples.case()))
def test_each_demanded_field_is_missed(name):
    data = samples.case()
    del data[name]
    assert refusal(data) == f"cases[3]: the field '{name}' is missing"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"id": 3}, "cases[3].id: 3 is not a string"),
        ({"world": "2"}, "cases[3].world: '2' is not an integer"),
        ({"world": 2.0}, "cases[3].world: 2.0 is not an integer"),
        ({"world": True}, "cases[3].world: True is not an integer"),
        ({"world": 0}, "cases[3].world: 0 is less than 1"),
        ({"seconds": "1.5"}, "cases[3].seconds: '1.5' is not a number"),
        ({"seconds": None}, "cases[3].seconds: None is not a number"),
        ({"seconds": False}, "cases[3].seconds: False is not a number"),
        ({"seconds": []}, "cases[3].seconds: [] is not a number"),
        ({"parameters": ["a"]}, "cases[3].parameters: ['a'] is not an object"),
        ({"missing": "offload"}, "cases[3].missing: 'offload' is not a list"),
        ({"missing": ["offload", 1]}, "cases[3].missing[1]: 1 is not a string"),
        ({"seeds": {"init": 0.5}}, "cases[3].seeds.init: 0.5 is not an integer"),
        ({"losses": {"sharded": 1.0}}, "cases[3].losses.sharded: 1.0 is not a list"),
        ({"losses": {"sharded": [1.0, "high"]}}, "cases[3].losses.sharded[1]: 'high' is not a number"),
        ({"failure": "it broke"}, "cases[3].failure: 'it broke' is not an object"),
        ({"explanation": EXPLAINED | {"again": "so"}}, f"cases[3].explanation.again: 'so' is not one of {VERDICTS}"),
        ({"explanation": EXPLAINED | {"first": 3}}, "cases[3].explanation.first: 3 is not an object"),
        ({"verdict": "passed"}, f"cases[3].verdict: 'passed' is not one of {VERDICTS}"),
        ({"peak_bytes": ["a"]}, "cases[3].peak_bytes[0]: 'a' is not an integer"),
        ({"failure": {"stage": "loss"}}, "cases[3].failure: the field 'text' is missing"),
        ({"failure": {"text": "x", "rank": "0"}}, "cases[3].failure.rank: '0' is not an integer"),
        ({"failure": {"text": "x", "element": [0, "a"]}}, "cases[3].failure.element[1]: 'a' is not an integer"),
        ({"distances": [{}]}, "cases[3].distances[0]: the field 'stage' is missing"),
        ({"collectives": [{"ranks": [0], "trace": [1]}]}, "cases[3].collectives[0].trace[0]: 1 is not a string"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(changes, message):
    assert refusal(samples.case(**changes)) == message


def test_a_long_value_stays_on_one_line():
    assert len(refusal(samples.case(world="line\n" * 1000))) < 130


def test_a_case_that_is_no_object_is_named():
    assert refusal("pass") == "cases[3]: 'pass' is not an object"


def test_a_text_that_differs_is_named_with_what_it_is():
    text = "suites/test_x.py:1: Mismatch between actual and expect strings:\n\n  same\n- gather a\n+ gather b\n  end"
    case = decode(CaseRecord, samples.case(verdict="fail", failure=samples.failure(text)), "case")
    assert case.why == "suites/test_x.py:1: Mismatch between actual and expect strings: - gather a + gather b"
