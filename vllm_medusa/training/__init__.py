"""Training of heads and EAGLE-3 drafters on the target's own texts; one module per method."""
