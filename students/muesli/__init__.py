"""Muesli (Hessel et al. 2021, arXiv 2104.06159) as a learner: sequences in, a better policy out."""

from reincarnate.config_muesli import MuesliConfig
from reincarnate.students.muesli.learner import Muesli
from reincarnate.types import SequenceBatch

__all__ = ["Muesli", "MuesliConfig", "SequenceBatch"]
