"""One run in its own directory: prepare, string the phases together, checkpoint, resume, report.

In the order in which a run passes through them: :mod:`.opening` makes or finds the directory and prepares
what the run is made of; :mod:`.run` executes the phases; :mod:`.buffers` has their replay buffers, D_T and
D_S; :mod:`.record` is what the run has come to; :mod:`.saved` writes that into checkpoints and restores it.
"""

from reincarnate.runner.run import Run

__all__ = ["Run"]
