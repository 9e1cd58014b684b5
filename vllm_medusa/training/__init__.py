"""Training of Medusa heads: texts that the target wrote, losses, Medusa-1 and Medusa-2."""
