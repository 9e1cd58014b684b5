"""Training of heads and EAGLE-3 drafters: the target's own texts, losses, a module a method."""
