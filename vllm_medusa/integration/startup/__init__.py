"""Before the first request: engine arguments, options, checks, and step times."""
