"""How right the heads are on text the target wrote, and which tree follows from it.

Two jobs, `calibrate` and `choose`, which alone load models. What they are made of knows the target
as two functions, ids to hidden states and hidden states to logits; walks and searches know ranks.
"""

from __future__ import annotations


class CalibrationError(ValueError):
    """Something that can't be calibrated, or a calibration that can't be used."""
