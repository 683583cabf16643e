"""Distillation: how far the student's policy is from the teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from reincarnate.losses.shapes import require, require_matrix


def log_policy(outputs: Tensor, temperature: float) -> Tensor:
    """``log softmax(outputs / temperature)`` over actions, in float32 or wider.

    Q-values become a policy at a temperature (Agarwal et al. 2022, section 4.2); a policy's logits already
    are one, at temperature 1.

    Args:
        outputs: [B, A] Q-values or logits.
        temperature: above 0; 0.1 multiplies the gradient on the outputs by 10.

    Returns:
        [B, A] log-probabilities.

    Raises:
        ValueError: another rank, or a temperature that is not positive.
    """
    require_matrix("outputs", outputs)
    if not temperature > 0:
        raise ValueError(f"temperature must be greater than 0, got {temperature}")
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    return torch.log_softmax(wide / temperature, dim=1)


def kl(teacher_log_policy: Tensor, student_log_policy: Tensor) -> Tensor:
    """``KL(pi_T || pi_S) = sum_a pi_T(a) (log pi_T(a) - log pi_S(a))`` per example, in nats.

    QDagger's distillation loss (Agarwal et al. 2022, eq. 2), to be minimised. Its gradient on the student
    is that of the cross-entropy ``- sum_a pi_T log pi_S``: notes that quote eq. 2 with a plus sign there
    would push the student away from the teacher.

    Args:
        teacher_log_policy: [B, A]; -inf is an action that the teacher never takes.
        student_log_policy: [B, A].

    Returns:
        [B], 0 or more; 0 only where the two policies are equal.

    Raises:
        ValueError: shapes that do not agree.
    """
    require(
        "student_log_policy", student_log_policy, require_matrix("teacher_log_policy", teacher_log_policy)
    )
    teacher_policy = teacher_log_policy.exp()
    terms = teacher_policy * (teacher_log_policy - student_log_policy)
    return torch.where(teacher_policy > 0, terms, 0.0).sum(dim=1)
