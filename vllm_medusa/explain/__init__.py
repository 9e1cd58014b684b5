"""What measured step costs would choose at which load, before a server starts."""
