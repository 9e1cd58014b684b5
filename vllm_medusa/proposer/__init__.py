"""Node tokens and survivals of draft trees, from a drafter's logits."""
