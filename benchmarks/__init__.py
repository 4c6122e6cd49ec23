"""How fast the course's decoder is, as ratios to what one would use instead: `make bench`."""
