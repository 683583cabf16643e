"""Whole games as people see them: in colour, at full size and at true speed, one or several side by side.

``players.py`` turns references into players and plays their games, ``screen.py`` draws what a viewer sees,
``video.py`` writes it as it comes, and ``film.py`` strings them together.
"""

from reincarnate.watching.film import Watched, watch

__all__ = ["Watched", "watch"]
