"""From a target and prompts to heads that are trained, measured and ready, stage by stage."""
