"""The demo: a 4M-parameter Python-code model, its Medusa heads and the script that made them."""
