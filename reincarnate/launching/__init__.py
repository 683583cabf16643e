"""Where the cells of a comparison run: as processes of this machine, on a Ray cluster, or in Slurm's queue.

What a node imports for a cell (:mod:`reincarnate.launching.work`) is small: the run is a process of its own.
"""
