"""``reincarnate watch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reincarnate.cli.group import PATH, main, print_result, say

if TYPE_CHECKING:
    from reincarnate.watching import Watched


@main.command()
@click.argument("refs", nargs=-1, required=True, metavar="REF|RUN [REF ...]")
@click.option(
    "--out",
    type=PATH,
    metavar="FILE",
    help="An .mp4 or .gif.  [default: replay.mp4 in RUN, else here]",
)
@click.option("--games", type=int, default=1, show_default=True, help="Whole games of each player.")
@click.option(
    "--act",
    "act_rule",
    metavar="RULE",
    help="auto, greedy, sample or epsilon=X.  [default: the run's, or auto]",
)
@click.option("--env", "env_id", metavar="ID", help="Environment, where a reference does not say.")
@click.option(
    "--backend", type=click.Choice(["envpool", "gymnasium"]), help="[default: the run's, or envpool]"
)
@click.option("--speed", type=float, default=1.0, show_default=True, help="1 is true speed.")
@click.option("--max-seconds", type=float, metavar="S", help="End the video there, even in mid-game.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the games and the actions.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def watch(refs: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write whole games as a video: RUN shows its teacher beside its student, several REF side by side."""
    from reincarnate import watching

    watched = watching.watch(*refs, announce=say, **options)
    print_result(watched.to_dict(), as_json, lambda: _lines(watched))


def _lines(watched: Watched) -> list[str]:
    minutes, seconds = divmod(round(watched.seconds), 60)
    lines = [
        f"{each.role + ' ' if each.role else ''}{each.ref} ({each.act}): "
        f"{', '.join(f'{score:g}' for score in each.scores) or 'no game to its end'}"
        for each in watched.players
    ]
    cut = ", cut at --max-seconds" if watched.cut else ""
    size = f"{watched.width}x{watched.height}, {watched.path.stat().st_size / 1e6:.1f} MB"
    return [*lines, f"{watched.path}: {minutes}:{seconds:02d} of {watched.env}, {size}{cut}"]
