"""The command ``shardproof submit``: puts summaries of run files into a results repository."""

from collections.abc import Sequence
from pathlib import Path

from shardproof import commands, extras
from shardproof.door import printable
from shardproof.reports import results
from shardproof.reports.texts import counted

_EPILOG = """\
examples:
  shardproof submit run.json --to ../results
  shardproof submit --to ../results        writes index, badges and page anew, as after a merge

exit codes: 0; 2 a run file cannot be published, or the folder cannot be written, and nothing has changed"""


@commands.reader
def submit(arguments: Sequence[str]) -> int:
    """Check run files and write their summaries into a repository; the exit code is 0, or 2 if one is refused."""
    parser = commands.parser(
        "shardproof submit",
        description="Check that run files are complete, are what their runs wrote, name no user or host and say what "
        "hardware they ran on; write a summary of each into the folder of a results repository, and its index, badges "
        "and page anew. Needs the extra 'page'.",
        epilog=_EPILOG,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a complete run file, not a merged one")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="the results repository")
    text = "take run files without a digest of their records, which older runs wrote; their summaries say so"
    parser.add_argument("--without-digest", action="store_true", help=text)
    options = parser.parse_args(arguments)
    folder = Path(options.to)
    try:
        # Here and not above: the help needs the standard library alone.
        from shardproof.reports.page.results import render_results
    except ModuleNotFoundError as error:
        return commands.refuse(extras.lacking("submit", "page", error))
    try:
        found = [results.summary_of(path, without_digest=options.without_digest) for path in options.runs]
        summaries = results.summaries_in(folder) | {results.place_of(one): one for one in found}
        content = render_results(summaries)
        made = results.write(folder, content)
    except ValueError as error:
        return commands.refuse(printable(str(error)))
    size = sum(map(len, content.values()))
    print(printable(f"{folder}: {counted(len(summaries), 'run')}, {size / 1e3:.0f} kB in all{made}"))
    return 0
