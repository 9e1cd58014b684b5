"""Accuracy of the heads on text that the target wrote, and tree search based on it.

Only the jobs `calibrate` and `choose` load models. Other modules take the target as two functions,
ids to hidden states and hidden states to logits; walks and searches only use ranks.
"""

from __future__ import annotations


class CalibrationError(ValueError):
    """Calibration is impossible, or an existing one can't be used."""
