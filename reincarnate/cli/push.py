"""``reincarnate push``."""

from __future__ import annotations

from pathlib import Path

import click

from reincarnate.cli.group import PATH, main, print_result, say


@main.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.argument("repo", metavar="REPO")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option("--revision", metavar="BRANCH", help="Commit there; made if need be.  [default: main]")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@click.option(
    "--force",
    is_flag=True,
    help="Also an unfinished run, or into a repository that holds something else.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def push(
    run: Path,
    repo: str,
    private: bool,
    revision: str | None,
    message: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Upload the run directory RUN to the Hub repository REPO (owner/name), without names of this machine."""
    from reincarnate.sharing import push as upload

    pushed = upload(run, repo, private=private, revision=revision, message=message, force=force, announce=say)
    told = f"{pushed.url} (commit {pushed.commit[:12]}, {len(pushed.files)} files)"
    print_result(pushed.to_dict(), as_json, lambda: [told])
