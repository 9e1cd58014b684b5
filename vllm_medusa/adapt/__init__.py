"""Train and measure heads for a target from prompts, stage by stage."""
