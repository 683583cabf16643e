"""``reincarnate push``."""

from __future__ import annotations

from pathlib import Path

import click

from reincarnate.cli.group import main, say


@main.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("repo", metavar="REPO")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option("--revision", metavar="BRANCH", help="Commit there; made if need be.  [default: main]")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@click.option(
    "--force",
    is_flag=True,
    help="Also an unfinished run, or into a repository that holds something else.",
)
def push(run: Path, repo: str, private: bool, revision: str | None, message: str | None, force: bool) -> None:
    """Upload the run directory RUN to the Hub repository REPO (owner/name), without names of this machine."""
    from reincarnate.sharing import push as upload

    pushed = upload(run, repo, private=private, revision=revision, message=message, force=force, announce=say)
    click.echo(f"{pushed.url} (commit {pushed.commit[:12]}, {len(pushed.files)} files)")
