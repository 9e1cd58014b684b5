"""The number of draft nodes to verify per step, from step costs and expected acceptance."""
