"""How right the heads are on text the target wrote, and which tree follows from it.

Knows the target as two functions, ids to hidden states and hidden states to logits, and a text as
token ids with the spans that were generated.
"""

from __future__ import annotations


class CalibrationError(ValueError):
    """Something that can't be calibrated, or a calibration that can't be used."""
