"""How many draft nodes a step should verify: what steps cost, what drafts bring, what follows."""
