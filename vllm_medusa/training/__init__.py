"""Training of Medusa and Hydra heads and EAGLE-3 drafters; one module per method."""
