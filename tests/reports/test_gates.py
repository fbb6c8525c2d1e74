"""What kept implementations from cases. `EXPECTTEST_ACCEPT=1` rewrites what is expected here."""

from expecttest import assert_expected_inline

from shardproof.reports.matrix import gates
from shardproof.runfile import parse_run
from tests.reports import samples


def skips(count, *missing, verdict="unsupported", **more):
    """This many cases that were skipped for the same reason."""
    ids = [f"{verdict}-{'-'.join(missing)}-{i}" for i in range(count)]
    return [samples.case(id=id_, verdict=verdict, missing=list(missing), **more) for id_ in ids]


def shown(*cases, full=False):
    return "\n\n".join("\n".join(block) for block in gates(parse_run(samples.run(*cases)), full=full))


def test_what_is_missing_is_counted_for_each_implementation():
    cases = [
        samples.case(id="ran"),
        *skips(2, "offload"),
        *skips(1, "tied", "offload", "streams"),
        *skips(1, "streams", verdict="unmet"),
        *skips(1, verdict="unmet"),
        *skips(1, "offload", implementation="torch.fsdp"),
        samples.case(id="ran", implementation="ddp"),
    ]
    assert_expected_inline(
        shown(*cases),
        """\
reference was kept from 5 of 6 cases by what is missing:
  3 unsupported: offload, 2 of which lack nothing else
  1 unmet: (the run file does not name what is missing), all of which lack nothing else
  1 unmet: streams, all of which lack nothing else
  1 unsupported: streams
  1 unsupported: tied

torch.fsdp was kept from 1 of 1 cases by what is missing:
  1 unsupported: offload, all of which lack nothing else""",
    )


def test_a_capability_that_alone_keeps_it_from_many_is_hinted_at():
    """Hardware is not: no adapter can declare it."""
    cases = [
        *skips(10, "tied"),
        *skips(12, "reshard"),
        *skips(9, "offload"),
        *skips(30, "offload", "hybrid"),
        *skips(40, "streams", verdict="unmet"),
    ]
    hint = "  hint: reshard alone keeps it from 12 cases, tied from 10; declare what the implementation has"
    assert shown(*cases).splitlines()[-1] == f"{hint} (docs/adapters.md)"


def test_a_long_list_is_shortened_unless_it_is_asked_for():
    cases = [case for i in range(12) for case in skips(12 - i, f"thing{i:02}", "other")]
    lines = shown(*cases).splitlines()
    assert (lines[1], lines[8]) == ("  78 unsupported: other", "   6 unsupported: thing06")
    assert lines[9:] == ["  5 more, at most 5 cases each; --full lists them"]
    assert shown(*cases, full=True).splitlines()[-1] == "   1 unsupported: thing11"


def test_a_run_without_skips_has_no_block():
    assert shown(samples.case()) == ""


def test_names_from_a_file_do_not_steer_the_terminal():
    assert "\x1b" not in shown(*skips(11, "red\x1b[31m", implementation="x\x1b[31m"))
