"""Engine arguments, options, start-up checks, and step times measured at start-up."""
